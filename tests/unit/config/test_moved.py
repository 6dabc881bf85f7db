"""A component that moved is named at its new place, where it is."""

import importlib

import pytest

from grpo_components.config.moved import _MOVED, moved_to


@pytest.mark.parametrize("old", _MOVED)
def test_what_moved_is_where_the_table_says(old):
    name = {"rollout.rewards": ".MathCorrectness"}.get(old, "")
    path = moved_to(f"grpo_components.{old}{name}")
    assert path is not None
    module, _, last = path.rpartition(".")
    if last[0].isupper():
        assert hasattr(importlib.import_module(module), last)
    else:
        importlib.import_module(path)


@pytest.mark.parametrize(
    "path", ["grpo_components.rollout.environments.SingleTurnEnvironment", "rollout.rewards.Mine"]
)
def test_what_stayed_or_is_not_ours_has_no_new_place(path):
    assert moved_to(path) is None

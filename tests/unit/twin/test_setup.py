"""Which recorded runs the twin takes its settings from."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.twin.setup import setup_of

CONFIG = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"


def test_a_run_with_turns_or_a_teacher_is_refused_and_one_without_the_key_is_not():
    config = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    assert setup_of(config, 2.0, has_references=False).num_references == 0
    with pytest.raises(ValueError, match=r"^colocate: true in the recorded run"):
        setup_of(config | {"colocate": True}, 2.0, has_references=False)
    with pytest.raises(ValueError, match=r"^teacher: given in the recorded run"):
        setup_of(config | {"teacher": {"path": "/models/a"}}, 2.0, has_references=False)
    with pytest.raises(ValueError, match=r"^replay_generation: given in the recorded run"):
        setup_of(config | {"replay_generation": {"share": 0.5}}, 2.0, has_references=False)
    del config["colocate"]  # of an earlier version
    assert setup_of(config, 2.0, has_references=False).max_staleness == 2

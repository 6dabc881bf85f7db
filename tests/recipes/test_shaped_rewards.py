"""What the recipe hands to reward shaping: lengths as the limit counts them."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.trajectory import Trajectory, summarize

RECIPE = Path(__file__).parents[2] / "recipes/async_grpo_full_finetune_distributed.py"


def response(mask, reward=1.0, finish_reason="stop"):
    size = len(mask)
    return Trajectory(
        prompt_ids=np.arange(3),
        response_ids=np.arange(size),
        response_mask=np.array(mask, bool),
        generator_logprobs=np.full(size, -1.0, np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_index=0,
        epoch=0,
        group_id=0,
        attempt=0,
        finish_reason=finish_reason,
        reward=reward,
    )


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("recipe_under_test", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where a dataclass looks up its annotations
        spec.loader.exec_module(module)
    return module.AsyncGRPOFullFinetuneRecipeDistributed()


@pytest.mark.parametrize("said", [0, 3, 6])
@pytest.mark.parametrize(("length", "loses"), [(6, 0.0), (8, 0.25), (10, 0.5)])
def test_the_overlong_penalty_counts_what_the_environment_said(recipe, said, length, loses):
    """Limit 10, of which 4 are punished: the same loss however many tokens the policy sampled."""
    mask = np.arange(length) >= said
    mask[0] = True  # the policy begins
    recipe.reward_shaping = RewardShaping(0.0, 10, overlong_tokens=4, overlong_penalty=0.5)
    recipe.references, recipe.ledger = [], SimpleNamespace(steps_done=0)
    groups = [summarize([response(mask), response([True])])]
    shaped = recipe.shaped_rewards(groups, [])
    assert shaped.tolist() == [[1.0 - loses, 1.0]]


@pytest.mark.parametrize("length", [3, 9, 10])
def test_a_conversation_that_the_limit_ended_loses_all_of_the_penalty(recipe, length):
    """However far from the limit it stood when the next words had no room."""
    recipe.reward_shaping = RewardShaping(0.0, 10, overlong_tokens=4, overlong_penalty=0.5)
    recipe.references, recipe.ledger = [], SimpleNamespace(steps_done=0)
    ended = response([True] * length, finish_reason="length")
    shaped = recipe.shaped_rewards([summarize([ended, response([True])])], [])
    assert shaped.tolist() == [[0.5, 1.0]]

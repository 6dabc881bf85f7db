"""A transformers policy trains as the torchtune decoder with the same weights does."""

from functools import partial

import pytest
from lib.trainer_ranks import (
    ADVANTAGES,
    SIBLINGS,
    assert_is_update,
    expected_update,
)

from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.meshes import Sharding

LAYOUTS = {
    "one rank, layers recomputed": (1, {"enable_activation_checkpointing": True}),
    "two shards": (2, {}),
    "one layer on two ranks": (2, {"sharding": Sharding(tensor=2)}),
}


def transformers_policy(base):
    build = partial(hugging_face, str(base))
    return {"build_model": build, "build_checkpointer": None, "model_type": None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_torchtune_decoder(ranks, base, layout):
    num_ranks, changes = LAYOUTS[layout]
    weights, metrics = expected_update(base, SIBLINGS, ADVANTAGES)
    results = ranks.step(
        base, num_ranks, SIBLINGS, ADVANTAGES, **transformers_policy(base), **changes
    )
    assert_is_update(results, weights, metrics)

"""Which responses a trainer leaves out."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.training.trainer_options import BatchOptions


@pytest.mark.parametrize(
    ("response", "left_out"),
    [({}, False), ({"failed": True}, True), ({"finish_reason": "length"}, True)]
    + [({"group_id": group}, group == 7) for group in (6, 7)],
)
def test_a_response_is_left_out_if_it_failed_was_cut_off_or_its_group_is(response, left_out):
    options = BatchOptions(
        ppo_epochs=1,
        updates_per_batch=1,
        tokens_per_micro_batch=64,
        contract=StalenessContract(0, 1),
        mask_overlong=True,
        left_out=frozenset({7}),
    )
    usual = {"failed": False, "finish_reason": "stop", "group_id": 1}
    trajectory: Any = SimpleNamespace(**usual | response)
    assert options.leaves_out(trajectory) is left_out

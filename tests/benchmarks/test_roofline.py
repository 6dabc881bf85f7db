"""The least time of a step is that of its operations, spread over two cores."""

import pytest
from roofline import GROUP_SIZE, GROUPS, PROMPT, RESPONSE, operations, table

from grpo_components.models.flops import ModelFlops


def test_operations_count_each_prompt_once_or_once_per_response():
    counted = operations(ModelFlops(per_token=1.0, per_pair=0.0, per_logprob=0.0))
    shared = GROUPS * (PROMPT + GROUP_SIZE * RESPONSE)
    assert counted == {
        "training, each prompt once": 3 * shared,
        "training, a row per response": 3 * GROUPS * GROUP_SIZE * (PROMPT + RESPONSE),
        "sampling, each prompt once": shared,
    }


@pytest.mark.parametrize(("step_s", "shown"), [(None, None), (0.6, "0.600 (2.0 times)")])
def test_both_cores_work_all_the_time_at_best(step_s, shown):
    parts = {"training, each prompt once": 4e9, "sampling, each prompt once": 2e9}
    lines = table(parts, 1e10, 1e10, step_s).splitlines()
    assert "| step, over two cores |  | 0.300 |" in lines
    assert (shown is None) != any(shown in line for line in lines if shown)

"""A record that differs from the type of its kind is refused with the place of the difference."""

import pytest

from grpo_components.records.receipt_shapes import LARGEST, mismatch

IDS = {"run": "a", "incarnation": "b"}
COUNTS = ("format", "attempt", "steps_done", "policy_version", "num_steps", "max_staleness")
START = {"record": "start"} | dict.fromkeys((*COUNTS, "groups_per_step", "group_size"), 1)
NONE = {"count": 0, "response_tokens_mean": None}
GROUPS = {"issued": 0, "generated": NONE, "filtered": NONE, "dropped": {}, "trained": NONE}
END = {"record": "end", "attempt": 0, "step": 1, "policy_version": 1, "finished": True} | {
    "generators": {"generator_0": {"version": 0, "checksum": None}},
    **{"acknowledged": [], "groups": GROUPS, "events": [], "living": [], "waiting": []},
}


@pytest.mark.parametrize("record", [START, START | IDS, END], ids=["old start", "start", "end"])
def test_whole_records_fit(record):
    assert mismatch(record) is None


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (None, ("record: null", "start, step, end")),
        ({"record": "begin"}, ('"begin"', "start, step, end")),
        ({**START, "run": "a"}, ("record has", "unknown fields: incarnation")),
        ({**START, "num_steps": True}, ("record.num_steps is true",)),
        ({**START, "num_steps": 1.0}, ("record.num_steps is 1.0",)),
        ({**END, "groups": {**GROUPS, "dropped": {"stale": {}}}}, ("record.groups.dropped.stale",)),
        ({**END, "events": [{"trained": 1}, {"eaten": 1}]}, ('record.events[1] is {"eaten": 1}',)),
        ({**END, "events": [{"dropped": 1}]}, ("record.events[0]", "fields: reason, reissue")),
        (
            {**END, "events": [{"generated": 1, "response_tokens": LARGEST + 1}]},
            ("record.events[0].response_tokens is", str(LARGEST + 1)),
        ),
        ({**END, "waiting": {}}, ("record.waiting is {}",)),
    ],
)
def test_the_first_difference_is_named_with_its_place(record, parts):
    problem = mismatch(record)
    assert problem is not None
    for part in parts:
        assert part in problem

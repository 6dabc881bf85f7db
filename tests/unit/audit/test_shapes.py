"""A line that differs from the type of its event is refused with the place of the difference."""

import pytest

from grpo_tools.audit.shapes import LARGEST, mismatch

COUNTS = ("format", "attempt", "steps_done", "policy_version", "num_steps", "max_staleness")
START = {"event": "start", "carried": {}} | dict.fromkeys(
    (*COUNTS, "groups_per_step", "group_size"), 1
)
END = {"event": "end", "attempt": 0, "step": 1, "policy_version": 1, "finished": True} | {
    "living": [],
    "waiting": [],
}
FINISH = {"event": "finish", "attempt": 0, "group": 1, "response_tokens": [3]}


@pytest.mark.parametrize("event", [START, START | {"run": "a", "incarnation": "b"}, END, FINISH])
def test_whole_events_fit(event):
    assert mismatch(event) is None
    assert mismatch(event | {"time": 1.5}) is None


@pytest.mark.parametrize(
    ("event", "parts"),
    [
        (None, ("event: null", "start, issue")),
        ({"event": "begin"}, ('"begin"', "start, issue")),
        ({**START, "num_steps": True}, ("event.num_steps is true",)),
        ({**START, "num_steps": 1.0}, ("event.num_steps is 1.0",)),
        ({**START, "carried": {"x": 1}}, ('event.carried has a key that is not a number: "x"',)),
        ({**END, "living": [{"group": 1}]}, ("event.living[0] has", "epoch, prompt, state")),
        ({**END, "extra": 1}, ("event has missing or unknown fields: extra",)),
        (
            {**FINISH, "response_tokens": [1, LARGEST + 1]},
            ("event.response_tokens[1] is", str(LARGEST + 1)),
        ),
        ({**END, "waiting": {}}, ("event.waiting is {}",)),
    ],
)
def test_the_first_difference_is_named_with_its_place(event, parts):
    problem = mismatch(event)
    assert problem is not None
    for part in parts:
        assert part in problem

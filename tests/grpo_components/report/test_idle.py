"""Idle time: the share of each step in which a role had nothing to work on."""

import pytest

from grpo_components.report.idle import Idle


def follow(events, references=0):
    idle = Idle(references)
    for number, (time, event, fields) in enumerate(events):
        idle.follow({"event": event, "number": number, "attempt": 0, "time": time, **fields})
    return idle


def issue(time, group, role="generator_0"):
    return time, "issue", {"group": group, "role": role}


def test_a_generator_is_busy_while_it_has_a_group_in_flight():
    idle = follow(
        [
            *[(0, "sample", {}), (4, "step", {"step": 1})],
            *[issue(5, 0), issue(6, 1), (7, "finish", {"group": 0}), (8, "finish", {"group": 1})],
            *[issue(9, 2), (10, "sample", {}), (14, "step", {"step": 2})],
            *[(16, "finish", {"group": 2}), (19, "sample", {}), (24, "step", {"step": 3})],
        ]
    )
    assert idle.steps == [1, 2, 3]
    # Step 2 (4 to 14): busy 5 to 8 and 9 to 14. Step 3 (14 to 24): busy until 16.
    shares = [shares["generator_0"] for shares in idle.shares[1:]]
    assert shares == pytest.approx([0.2, 0.8])
    assert [s["trainers"] for s in idle.shares] == pytest.approx([0.0, 0.6, 0.5])


def test_a_reference_is_busy_from_the_end_of_generation_until_the_group_is_buffered():
    idle = follow(
        [
            *[(0, "sample", {}), issue(0, 0), issue(0, 1), (2, "finish", {"group": 0})],
            *[(3, "buffer", {"group": 0}), (4, "finish", {"group": 1})],
            *[(10, "step", {"step": 1})],
        ],
        references=2,
    )
    [shares] = idle.shares
    assert shares["reference_0"] == pytest.approx(0.9)
    assert shares["reference_1"] == pytest.approx(0.4)


def test_the_first_step_counts_from_the_first_group():
    """Groups generated before the first batch must not hide that the generator then waits."""
    idle = follow(
        [
            *[issue(0, 0), (4, "finish", {"group": 0}), (5, "buffer", {"group": 0})],
            *[(8, "sample", {}), (10, "step", {"step": 1})],
        ],
        references=1,
    )
    [shares] = idle.shares
    expected = {"generator_0": 0.6, "reference_0": 0.9, "trainers": 0.8}
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("event", ["restart", "rollback"])
def test_a_restart_ends_what_the_role_had_in_flight(event):
    idle = follow(
        [
            *[(0, "sample", {}), issue(0, 0), (5, event, {"role": "generator_0"})],
            *[(5, "sample", {}), (10, "step", {"step": 1})],
        ]
    )
    # After a rollback the step counts from the first group or batch of the new attempt.
    expected = 0.5 if event == "restart" else 1.0
    assert idle.shares[0]["generator_0"] == pytest.approx(expected)


def test_a_repeated_step_counts_once():
    once = [(time, "sample", {}) for time in (0, 2, 4)] + [(5, "rollback", {"role": "trainer_0"})]
    steps = [(time + 1, "step", {"step": time // 2 + 1}) for time in (0, 2, 4)]
    again = [(6, "sample", {}), (9, "step", {"step": 2})]
    idle = follow(sorted(once[:3] + steps + once[3:], key=lambda event: event[0]) + again)
    assert idle.steps == [1, 2] and len(idle.shares) == 2

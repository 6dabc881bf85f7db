"""The benchmark of equal budgets counts what happened within the budget, and no more."""

from equal_budget import Measured, measured_of, table


def record(step, seconds, held_out=None, staleness=1.0):
    return {
        **{"step": step, "time/wall_clock": seconds, "staleness/mean": staleness},
        **({} if held_out is None else {"eval/success_rate": held_out}),
    }


def test_steps_and_evaluations_after_the_budget_do_not_count():
    records = [
        record(0, 20.0, held_out=0.3, staleness=9.0),
        *(record(1, 25.0), record(2, 29.0, held_out=0.5, staleness=2.0)),
        record(3, 31.0, held_out=0.9, staleness=2.0),
    ]
    assert measured_of(records, budget_s=10.0) == Measured(2, 0.5, 1.5)


def test_the_table_has_medians_over_the_seeds():
    runs = [Measured(10, 0.5, 0.0), Measured(12, 0.7, 0.2), Measured(11, 0.4, 0.1)]
    assert table({0: runs}).splitlines()[-1] == (
        "| 0 | 11 (10..12) | 0.500 (0.400..0.700) | 0.10 (0.00..0.20) |"
    )

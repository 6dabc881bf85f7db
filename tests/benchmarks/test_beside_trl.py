"""The comparison with TRL measures both from the lines of their runs, in the same way."""

import pytest
from beside_trl import SAMPLES_PER_STEP, WARM_UP_STEPS, Measured, measured_of, table


def test_a_run_is_measured_without_its_first_steps():
    lines = [{"step": 0, "seconds": 0.0, "held_out": 0.3}]
    for step in range(1, WARM_UP_STEPS + 21):
        seconds = 100.0 + 2 * (step - WARM_UP_STEPS) if step >= WARM_UP_STEPS else 9.0
        lines.append({"step": step, "seconds": seconds, "success": step / 100})
        if step % 5 == 0:
            lines.append({"step": step, "seconds": seconds, "held_out": 0.6 + step / 100})
    measured = measured_of(lines, 7.0)
    assert measured.samples_per_s == pytest.approx(SAMPLES_PER_STEP / 2)
    assert measured.seconds_to == {0.8: 130.0}
    assert measured.success == pytest.approx(sum(range(16, 26)) / 1000)
    assert measured.start_s == 7.0


def test_ratios_are_those_of_the_runs_that_took_turns():
    def runs(*speeds, seconds):
        return [Measured(9.0, speed, {0.8: seconds}, 0.5) for speed in speeds]

    text = table(
        {"ours": runs(200.0, 900.0, seconds=10.0), "TRL": runs(100.0, 300.0, seconds=40.0)}
    )
    assert "samples per second: 2.50 (2.00..3.00) times" in text
    assert "time to 0.8: 4.00 (4.00..4.00) times" in text
    assert "not reached" in text

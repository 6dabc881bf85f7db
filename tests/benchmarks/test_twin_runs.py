"""The twin's benchmark changes few keys of the fitted run, and counts only what was not fitted."""

from types import SimpleNamespace

from twin import AGAIN, CASES, FIT, Compared, folder_of, table

from grpo_components.twin.simulation import WARM_UP_STEPS, Prediction


def test_enough_runs_are_not_fitted_and_each_has_steps_to_measure(tmp_path):
    others = [case for case in CASES if not case.startswith(FIT)]
    assert len(others) >= 12
    assert next(iter(CASES)) == FIT
    assert sum(case.startswith(AGAIN) for case in CASES) == 3
    assert all(steps >= 3 * WARM_UP_STEPS for steps, _ in CASES.values())
    assert len({folder_of(tmp_path, case) for case in CASES}) == len(CASES)


def test_the_mean_error_leaves_out_the_fit_and_its_repeats():
    def compared(measured, twin):
        run = SimpleNamespace(
            step_s=lambda: measured, staleness_mean=1.0, staleness_max=2, dropped=lambda _: 0
        )
        return Compared(run, [Prediction(step_s=twin)], others=0.25)

    runs = {FIT: compared(1.0, 5.0), "a": compared(1.0, 1.1), "b": compared(2.0, 1.0)}
    text = table(runs)
    assert "| a | 1.000 | 1.100 | +10.0% | 1.00 / 0.00 | 2 / 0 | 0 / 0 | 0.25 |" in text
    assert "Mean error of the 2 runs that were not fitted: 30.0%, largest 50.0%." in text

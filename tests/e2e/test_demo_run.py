"""The demo's job, by the real `tune`, on real Ray, vLLM, torchrl and torchtune."""

from statistics import mean

from lib.whole_runs import KEYS, assert_audited, metrics

from grpo_tools.simulate.fit import Lengths, fit
from grpo_tools.simulate.simulation import simulate


def test_it_learns_asynchronously(demo_run):
    steps = metrics(demo_run.folder)
    assert [record["step"] for record in steps] == list(range(101))
    assert 0.25 <= steps[0]["eval/success_rate"] <= 0.5
    assert steps[-1]["eval/success_rate"] >= 0.65, "204 prompts: ten standard errors above"
    assert all(record.keys() >= KEYS for record in steps[1:])
    assert 0 < max(record["staleness/max"] for record in steps[1:]) <= 2
    assert all(record["policy_version"] == record["step"] for record in steps)


def test_its_audit_holds(demo_run):
    assert_audited(demo_run.folder)


def test_it_tells_what_came_out(demo_run):
    for words in ("held-out success", "staleness", "tokens per second", "checkpoint"):
        assert words in demo_run.output, words


def test_a_simulation_is_fitted_from_its_files(demo_run):
    """Roles wait for a core here, which nothing simulates: only the bounds of a step are known."""
    run = fit(demo_run.folder)
    lengths = Lengths(run.groups, run.setup.generator.max_response_tokens, seed=0)
    simulated = simulate(run.setup, run.times, lengths)
    training_s = mean(record["time/train"] for record in metrics(demo_run.folder)[1:])
    assert training_s / 2 < simulated.step_s < run.step_s * 2
    assert 0 < simulated.staleness_max <= run.setup.max_staleness

"""Roles of a run are killed and frozen at random moments."""

import random
import statistics

import pytest
from lib.chaos import Fault, forked_recipe
from lib.finished_runs import run_of
from lib.whole_runs import assert_audited, batch_hashes, finish, metrics

pytestmark = pytest.mark.timeout(3600)

METHODS = {
    "generator_0": ("generate_group", "load_weights", "evaluate", "sleep"),
    "generator_1": ("generate_group", "load_weights", "evaluate", "sleep"),
    "reference_0": ("add_logprobs",),
    "replay_buffer": ("add", "take", "write_state"),
    "parameter_server": ("push", "newest"),
    "trainer_0": ("train_step", "gather_weights", "export_weights", "hold_state", "write_state"),
    "trainer_1": ("train_step", "gather_weights", "export_weights", "hold_state", "write_state"),
}
NUM_STEPS = 30
RUN = (
    *("groups_per_step=4", "group_size=4", "eval_dataset.num_rows=16", "loss.kl_coeff=0.001"),
    *(f"num_steps={NUM_STEPS}", "num_generators=2", "num_trainers=2", "rollouts_in_flight=4"),
    *("save_every_n_steps=4", "eval_every_n_steps=10", "max_restarts=1000"),
    "timeouts.heartbeat_s=10",
)
SYNCHRONOUS = ("max_staleness=0", "pull_every_m_rollouts=1")
KINDS = {
    "asynchronous": (),
    "synchronous": SYNCHRONOUS,
    "colocated": (*SYNCHRONOUS, "colocate=true"),
}


def random_faults(chance, count, kind):
    """Faults that are due at some call of a role, or up to half a second later."""
    faults = []
    for _ in range(count):
        role = chance.choice(sorted(METHODS))
        method = chance.choice([m for m in METHODS[role] if m != "sleep" or kind == "colocated"])
        rare = method in ("evaluate", "hold_state", "write_state")
        number = chance.randint(1, 3 if rare else NUM_STEPS)
        delay_s, stop = chance.choice((0.0, chance.uniform(0, 0.5))), chance.random() < 0.2
        faults.append(Fault(role, method, number, delay_s=delay_s, stop=stop))
    return faults


@pytest.fixture
def undisturbed(shared_runs, tiny_policy, kind):
    """A run of the same kind without faults; of a colocated one, a run that is not colocated."""
    name = "asynchronous" if kind == "asynchronous" else "synchronous"
    make = run_of(tiny_policy, *RUN, *KINDS[name])
    with shared_runs.look(f"undisturbed {name}", make) as run:
        yield run.folder


def late_reward(output_dir):
    steps = {each["step"]: each for each in metrics(output_dir)}  # a step may be trained twice
    last = [steps[step]["rollout/reward_mean"] for step in sorted(steps)[-NUM_STEPS // 3 :]]
    return statistics.mean(last), statistics.stdev(last) / len(last) ** 0.5


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_outlives_ten_random_faults_and_loses_nothing(
    kind, seed, tune, tmp_path, undisturbed
):
    """It learns as an undisturbed one does, and if synchronous, from the very same batches."""
    faults = random_faults(random.Random(f"{kind} {seed}"), 10, kind)
    recipe, environment = forked_recipe(tmp_path, faults)
    process, output_dir = tune(*RUN, *KINDS[kind], recipe=recipe, env=environment)
    code, output = finish(process)
    assert code == 0 and "chaos: " in output, output
    assert_audited(output_dir)
    assert sorted(batch_hashes(output_dir)) == list(range(1, NUM_STEPS + 1))
    if kind != "asynchronous":
        assert batch_hashes(output_dir) == batch_hashes(undisturbed), output
    (reward, error), (expected, its_error) = late_reward(output_dir), late_reward(undisturbed)
    assert reward >= expected - 3 * (error**2 + its_error**2) ** 0.5, output

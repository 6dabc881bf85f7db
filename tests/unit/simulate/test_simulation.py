"""A simulation runs the product's own loops and contract, with times fitted from a run's files."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lib.rows import write_rows
from omegaconf import OmegaConf

from grpo_components.config.reading import read_settings
from grpo_components.exchange.ledger import Ledger
from grpo_tools.simulate import simulation
from grpo_tools.simulate.__main__ import advise, main
from grpo_tools.simulate.fit import Lengths, Times, fit, read_setup
from grpo_tools.simulate.roles import VirtualEngine
from grpo_tools.simulate.simulation import simulate
from grpo_tools.simulate.virtual_time import DeadlockError, now, run_in_virtual_time

NOTHING = Times(
    **dict.fromkeys(("step_s", "step_s_per_sequence", "step_s_per_prompt", "reward_s"), 0.0),
    **dict.fromkeys(("collect_s", "load_s", "update_s", "gather_s", "export_s"), 0.0),
    **dict.fromkeys(("train_s_per_token", "prompt_tokens", "reference_s_per_token"), 0.0),
    train_scatter=(1.0,),
)
TIMES = replace(
    NOTHING,
    **{"step_s": 0.007, "step_s_per_sequence": 0.0001, "step_s_per_prompt": 0.001},
    **{"collect_s": 0.002, "load_s": 0.02, "update_s": 0.006, "gather_s": 0.004},
    **{"export_s": 0.001, "train_s_per_token": 0.0002, "reference_s_per_token": 0.0001},
    train_scatter=(0.8, 1.0, 1.2),
    prompt_tokens=20.0,
)
CONFIG: Any = OmegaConf.to_container(
    OmegaConf.load(Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"), resolve=True
)


def config(**changes):
    """The demo's config with the sizes of a small synchronous job, and changes."""
    sizes = {"rollouts_in_flight": 8, "pull_every_m_rollouts": 1, "max_staleness": 0}
    sizes |= {"groups_per_step": 1, "group_size": 2, "num_steps": 12, "stale_groups": "drop"}
    generator = {**CONFIG["generator"], "max_response_tokens": 100, "max_num_seqs": 64}
    return {**CONFIG, **sizes, "generator": generator, **changes}


def job(num_references=0, **changes):
    return read_settings(config(**changes)).model_copy(update={"num_references": num_references})


SETUP = job()
RECORDED = {"rollouts_in_flight": 4, "pull_every_m_rollouts": 4, "max_staleness": 2}
RECORDED |= {"groups_per_step": 4, "group_size": 4, "num_steps": 30, "num_references": 1}
FITTED = replace(TIMES, train_scatter=(1.0,))
RAGGED = [[3, 9, 4, 20], [10, 10, 10, 10], [1, 2, 40, 5]]


def lengths(groups=RAGGED, longest=100, seed=0):
    return Lengths(groups, longest, seed)


@pytest.fixture
def events(monkeypatch):
    """The events of all simulations of a test, each with its virtual time."""
    found = []

    class Followed(Ledger):
        def __init__(self, *given):
            super().__init__(*given)
            self.events.listen(lambda event: found.append((now(), event)))

    monkeypatch.setattr(simulation, "Ledger", Followed)
    return found


def test_tokens_carry_the_version_of_the_weights_that_sampled_them():
    async def scenario():
        engine = VirtualEngine(replace(NOTHING, step_s=1.0, load_s=0.5), max_num_seqs=8)
        running = asyncio.create_task(engine.run())
        response = asyncio.ensure_future(engine.sample(6))
        await asyncio.sleep(1.5)
        await engine.load(3)
        loaded_s = now()
        await asyncio.sleep(1.2)
        await engine.load(4)
        versions = await response
        running.cancel()
        return loaded_s, versions, now()

    loaded_s, versions, end = run_in_virtual_time(scenario())
    assert loaded_s == pytest.approx(2.5)
    assert versions == Counter({0: 2, 3: 2, 4: 2})
    assert end == pytest.approx(6 + 2 * 0.5)


def test_who_waits_forever_is_no_silent_wait():
    with pytest.raises(DeadlockError, match="every task waits"):
        run_in_virtual_time(asyncio.Event().wait())


def test_a_synchronous_job_of_constant_times_takes_their_sum():
    times = replace(NOTHING, step_s=0.5, load_s=0.25, update_s=3.0, gather_s=0.75)
    found = simulate(SETUP, times, lengths([[8, 8]]))
    generate, train, push, pull = 8 * 0.5, 3.0, 0.75, 0.25
    assert found.step_s == pytest.approx(generate + train + push + pull)
    assert (found.staleness_max, found.staleness_mean) == (0, 0.0)
    assert found.idle["generators"] == pytest.approx((train + push) / found.step_s)
    assert found.idle["trainers"] == pytest.approx((generate + pull) / found.step_s)


@pytest.mark.parametrize(("generate_s", "train_s"), [(0.1, 5.0), (5.0, 0.1)])
def test_an_asynchronous_job_takes_the_longer_of_its_halves(generate_s, train_s):
    times = replace(NOTHING, step_s=generate_s / 8, update_s=train_s)
    setup = job(max_staleness=4, rollouts_in_flight=1, num_steps=40)
    found = simulate(setup, times, lengths([[8, 8]]))
    assert found.step_s == pytest.approx(max(generate_s, train_s), rel=0.02)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(events):
    setup, runs = job(max_staleness=2, groups_per_step=4, group_size=4), []
    for seed in (1, 1, 2):
        events.clear()
        runs.append((simulate(setup, TIMES, lengths(seed=seed), seed=seed), [*events]))
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]


def test_no_role_is_idle_for_more_than_all_of_the_time(events):
    """A step of the engine is under way when the time is taken."""
    setup = job(max_staleness=1, groups_per_step=3, rollouts_in_flight=3, group_size=4)
    found = simulate(setup, TIMES, lengths(seed=490519), seed=490519, filtered=0.1)
    assert all(0 <= share <= 1 + 1e-9 for share in found.idle.values())
    assert [time for time, _ in events] == sorted(time for time, _ in events)


def test_a_groups_lengths_depend_on_its_number_alone():
    drawn = lengths(seed=5)
    again = [lengths(seed=5).of_group(group, 3) for group in reversed(range(9))]
    assert [drawn.of_group(group, 3) for group in range(9)] == again[::-1]
    for size in (2, 9):
        assert len(drawn.of_group(0, size)) == size
    assert sorted(lengths().of_group(1, 4)) in [sorted(group) for group in RAGGED]
    assert all(max(lengths(longest=10).of_group(group, 4)) <= 10 for group in range(9))


def test_the_advised_split_gives_the_slow_half_more_gpus():
    setup = job(max_staleness=4, groups_per_step=8, rollouts_in_flight=2)
    for step, per_token, most in ((0.5, 1e-4, "generators"), (0.01, 1e-1, "trainers")):
        times = replace(NOTHING, step_s=step, train_s_per_token=per_token)
        tried = advise(setup, 6, lambda each, times=times: simulate(each, times, lengths()))
        (generators, trainers, references), found = next(iter(tried.items()))
        assert (generators + trainers, references) == (6, 0)
        assert (generators > trainers) == (most == "generators")
        assert found.step_s == min(each.step_s for each in tried.values())
    with pytest.raises(ValueError, match="--gpus: 1 given for generators and trainers"):
        advise(setup, 1, lambda each: simulate(each, times, lengths()))


def test_no_split_is_advised_that_another_key_refuses():
    setup = job(num_trainers=2, data_parallel_replicate_dim=2, groups_per_step=8)
    tried = advise(setup, 7, lambda each: simulate(each, TIMES, lengths()))
    assert {trainers % 2 for _, trainers, _ in tried} == {0}
    with pytest.raises(ValueError, match=r"^--gpus: 2 given, and other keys refuse"):
        advise(setup, 2, lambda each: simulate(each, TIMES, lengths()))


@pytest.mark.parametrize("side", ["generators", "trainers"])
def test_no_split_is_advised_for_a_role_of_several_gpus(side):
    parallel = {"num_trainers": 2, "tensor_parallel_dim": 2, "group_size": 4}
    if side == "generators":
        parallel = {"generator": {**config()["generator"], "tensor_parallel_size": 2}}
    with pytest.raises(ValueError, match=r"^--gpus: 8 given for roles with tensor parallel"):
        advise(job(**parallel), 8, lambda each: simulate(each, TIMES, lengths()))


@pytest.fixture
def folder(tmp_path, events):
    run = simulate(job(**RECORDED), FITTED, lengths(seed=3), seed=3)
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(**RECORDED)))
    receipts = [{"event": "start", "time": 0.0}]
    finished, steps = {}, []
    for time, event in events:
        receipts.append({**event, "time": time})
        if event["event"] == "finish":
            finished[event["group"]] = event["response_tokens"]
        if event["event"] == "sample":
            tokens = sum(sum(finished[group]) for group in event["groups"])
            seconds = FITTED.train(tokens, 4, 1)
            steps.append(
                {
                    "step": event["step"],
                    "time/train": seconds,
                    "time/update": FITTED.update_s,
                    "rollout/response_tokens_mean": tokens / 16,
                    "staleness/mean": run.staleness_mean,
                    "staleness/max": run.staleness_max,
                }
            )
    write_rows(tmp_path / "receipts.jsonl", *receipts)
    write_rows(logs / "metrics.jsonl", {"step": 0}, *steps)
    write_rows(logs / "heartbeats.jsonl", *heartbeats(events, finished))
    return tmp_path


def heartbeats(events, finished):
    responses, engine = len(finished) * 4, {}
    for size, new in ((1, 0), (16, 0), (4, responses / 2), (8, responses / 2)):
        seconds = 100 * FITTED.engine_step(size, new / 100)
        engine[f"{size}"] = [100, 100 * size, new, 20 * new, seconds, seconds]
    engine_s = sum(sums[5] for sums in engine.values())
    counts = [event["event"] for _, event in events]
    pushes, loads = counts.count("push"), counts.count("load")
    sampling = engine_s + FITTED.collect_s * responses
    use = {
        "generator_0": {"sampling": sampling, "loading weights": FITTED.load_s * loads},
        "trainer_0": {
            "gather_weights": FITTED.gather_s * pushes,
            "export_weights": FITTED.export_s * pushes,
        },
        "reference_0": {"add_logprobs": sum(map(FITTED.reference, map(sum, finished.values())))},
    }
    use["generator_0"]["idle: rewards, environments"] = 0.0
    beats = [
        {"role": role, "cpu_seconds": {"starting": 9.0, **seconds}, "seconds": dict(seconds)}
        for role, seconds in use.items()
    ]
    beats[0]["engine_steps"] = engine
    return beats


def test_the_fit_finds_the_times_behind_the_files(folder):
    found = fit(folder)
    assert found.setup == read_settings(config(**RECORDED))
    times = vars(found.times)
    assert times.pop("train_scatter") == pytest.approx([1.0] * 25, rel=0.01)
    assert times == pytest.approx({name: getattr(FITTED, name) for name in times}, rel=0.01)


def test_a_run_without_heartbeats_of_its_roles_is_refused_in_one_line(folder, capsys):
    write_rows(folder / "logs" / "heartbeats.jsonl", {"role": "driver"})
    assert main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no heartbeats of a trainer" in line


def test_a_simulated_run_keeps_its_contract(folder, capsys):
    assert main([str(folder), "max_staleness=0", "pull_every_m_rollouts=1", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    rows = {line[:24].strip(): line[24:].split() for line in shown.splitlines()}
    assert rows["staleness, max"][2] == "0"
    recorded, own, synchronous = (float(cell) for cell in rows["seconds a step"])
    assert own == pytest.approx(recorded, rel=0.1)
    assert synchronous > own
    assert "changed: max_staleness=0 pull_every_m_rollouts=1" in shown
    assert "best of" in shown and "num_trainers=" in shown


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["max_stalenes=1"], "max_stalenes"),
        (["max_staleness=-1"], "max_staleness"),
        (["groups_per_step=half"], "groups_per_step"),
        (["generator.max_num_seqs=0"], "generator.max_num_seqs"),
        (["stale_groups=keep"], "stale_groups"),
        (["push_every_n_steps=4"], "push_every_n_steps"),
        (["num_steps=9"], "num_steps"),
        (["--gpus", "1"], "--gpus"),
    ],
)
def test_a_wrong_setting_is_one_line(folder, capsys, arguments, key):
    assert main([str(folder), *arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert f": {key}: " in shown.err


def test_a_resumed_run_is_refused(folder, capsys):
    with (folder / "receipts.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "attempt": 1, "time": 9.0}) + "\n")
    assert main([str(folder)]) == 2
    assert "the run resumed; a simulation needs an undisturbed" in capsys.readouterr().err


def test_no_longer_responses_are_predicted_from_those_that_were_cut_off(folder, capsys):
    limit = "generator.max_response_tokens"
    assert main([str(folder), f"{limit}=120"]) == 0
    cut = {**config()["generator"], "max_response_tokens": max(map(max, RAGGED))}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(**RECORDED, generator=cut)))
    assert main([str(folder), f"{limit}=30"]) == 0
    assert main([str(folder), f"{limit}=41"]) == 2
    assert f": {limit}: 41 given, and " in capsys.readouterr().err


def test_files_that_do_not_suffice_are_one_line(folder, capsys, tmp_path):
    def problem(folder):
        assert main([str(folder)]) == 2
        return capsys.readouterr().err

    assert "nothing" in problem(tmp_path / "nothing")
    with (folder / "receipts.jsonl").open("a") as file:
        file.write(json.dumps({"event": "restart", "role": "generator_0", "time": 1.0}) + "\n")
    assert "a role was restarted" in problem(folder)
    (folder / "receipts.jsonl").write_text("")
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "logs" / "metrics.jsonl").write_text("".join(lines[:6]))
    assert "10 steps or more are needed" in problem(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"colocate": True},
        {"teacher": {"path": "/models/a"}},
        {"replay_generation": {"share": 0.5}, "max_staleness": 2, "groups_per_step": 4},
        {"train_from": "/run/trajectories.jsonl"},
        {"rollout_only": True},
    ],
)
def test_a_run_with_what_is_not_simulated_is_refused(change):
    assert read_setup(config(), has_references=False).num_references == 0
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: used by the recorded run"):
        read_setup(config(**change), has_references=False)

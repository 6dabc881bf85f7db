"""The fit finds the times that a run's files were written with, and refuses what it cannot fit."""

import json
from dataclasses import replace

import pytest
import yaml

from grpo_tools.simulate.__main__ import main
from grpo_tools.simulate.engine import StepTime
from grpo_tools.simulate.fit import UnfitError, fit
from grpo_tools.simulate.settings import Setup
from grpo_tools.simulate.simulation import simulate
from grpo_tools.simulate.times import Lengths, Times

TIMES = Times(
    engine_step=StepTime(0.007, 0.0001, 0.001),
    collect_s=0.002,
    reward_s=0.0,
    load_s=0.02,
    update_s=0.006,
    train_s_per_token=0.0002,
    train_scatter=(1.0,),
    prompt_tokens=20.0,
    gather_s=0.004,
    export_s=0.001,
    reference_s_per_token=0.0003,
    call_s=0.0015,
)
SETUP = Setup(
    num_generators=1,
    num_trainers=1,
    num_references=1,
    rollouts_in_flight=4,
    push_every_n_steps=1,
    pull_every_m_rollouts=4,
    max_staleness=2,
    stale_groups="drop",
    groups_per_step=4,
    group_size=4,
    num_steps=30,
    max_response_tokens=64,
    max_num_seqs=64,
)
GROUPS = [[3, 9, 4, 20], [10, 10, 10, 10], [1, 2, 40, 5]]


def write_lines(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.fixture
def folder(tmp_path):
    """Files of a run as it was simulated."""
    run = simulate(SETUP, TIMES, Lengths(GROUPS, seed=3), seed=3)
    logs, config = tmp_path / "logs", vars(SETUP) | {"generator": {}}
    logs.mkdir()
    for name in ("max_response_tokens", "max_num_seqs"):
        config["generator"][name] = config.pop(name)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    events = [{"event": "start", "time": 0.0}]
    finished, steps = {}, []
    for time, event in run.events:
        events.append({**event, "time": time})
        if event["event"] == "finish":
            finished[event["group"]] = event["response_tokens"]
        if event["event"] == "sample":
            tokens = sum(sum(finished[group]) for group in event["groups"])
            seconds = TIMES.train(tokens, SETUP.groups_per_step, 1)
            steps.append(
                {
                    "step": event["step"],
                    "time/train": seconds,
                    "time/update": TIMES.update_s,
                    "rollout/response_tokens_mean": tokens / 16,
                    "staleness/mean": run.staleness_mean,
                    "staleness/max": run.staleness_max,
                }
            )
    write_lines(logs / "events.jsonl", events)
    write_lines(logs / "metrics.jsonl", [{"step": 0}, *steps])
    write_lines(logs / "heartbeats.jsonl", heartbeats(run, finished, events[-1]["time"]))
    return tmp_path


def heartbeats(run, finished, end):
    """The last heartbeat of each role, and the first and last of the driver."""
    step, responses = TIMES.engine_step, len(finished) * SETUP.group_size
    engine = {
        f"{size}": [100, 100 * size, new, 20 * new, *2 * [100 * step.of(size, new / 100)]]
        for size, new in ((1, 0), (16, 0), (4, responses / 2), (8, responses / 2))
    }
    engine_s = sum(sums[5] for sums in engine.values())
    counts = [event["event"] for _, event in run.events]
    pushes, loads = counts.count("push"), counts.count("load")
    sampling = engine_s + TIMES.collect_s * responses
    use = {
        "generator_0": {"sampling": sampling, "loading weights": TIMES.load_s * loads},
        "trainer_0": {
            "gather_weights": TIMES.gather_s * pushes,
            "export_weights": TIMES.export_s * pushes,
        },
        "reference_0": {"add_logprobs": sum(map(TIMES.reference, map(sum, finished.values())))},
    }
    use["generator_0"]["idle: rewards, environments"] = 0.0
    beats = [
        {"role": role, "cpu_seconds": {"starting": 9.0, **seconds}, "seconds": dict(seconds)}
        for role, seconds in use.items()
    ]
    beats[0]["engine_steps"] = engine
    driver = {"role": "driver"}
    return [
        driver | {"time": 0.0, "cpu_s": 5.0},
        *beats,
        driver | {"time": end, "cpu_s": 5.0 + run.calls * TIMES.call_s},
    ]


def test_the_fit_finds_the_times_behind_the_files(folder):
    found = fit(folder)
    assert found.setup == SETUP
    times = vars(found.times)
    assert vars(times.pop("engine_step")) == pytest.approx(vars(TIMES.engine_step), rel=1e-3)
    assert times.pop("call_s") == pytest.approx(TIMES.call_s, rel=0.1), ()
    assert times.pop("train_scatter") == pytest.approx([1.0] * 25, rel=0.01)
    assert times == pytest.approx({name: getattr(TIMES, name) for name in times}, rel=0.01)


def test_a_reference_takes_its_time_for_prompts_and_responses_alike():
    """Fitted for each token of responses and applied to prompts, too, it was too long."""
    own = replace(TIMES, reference_s_per_token=0.5, prompt_tokens=7.0)
    assert own.reference(9) == pytest.approx(8.0)


def test_a_simulated_run_keeps_its_contract(folder, capsys):
    assert main([str(folder), "max_staleness=0", "pull_every_m_rollouts=1", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    rows = {line[:24].strip(): line[24:].split() for line in shown.splitlines()}
    assert rows["staleness, max"][2] == "0"
    recorded, own, synchronous = (float(cell) for cell in rows["seconds a step"])
    assert own == pytest.approx(recorded, rel=0.1)
    assert synchronous > own
    assert "changed: pull_every_m_rollouts=1 max_staleness=0" in shown
    assert "best of" in shown and "num_trainers=" in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["max_stalenes=1"], "max_stalenes: no key of a simulation; allowed: num_generators"),
        (["max_staleness=-1"], "max_staleness: -1 given; allowed: 0 to"),
        (["groups_per_step=half"], "groups_per_step: 'half' given; allowed: a whole number"),
        (["stale_groups=keep"], "stale_groups: 'keep' given; allowed: drop or wait"),
        (["push_every_n_steps=4"], "push_every_n_steps: 4 given with max_staleness 2"),
        (["num_steps=9"], "num_steps: 9 given; allowed: 10 or more"),
        (["--gpus", "1"], "--gpus: 1 given for generators, trainers and references; allowed: 3"),
    ],
)
def test_a_wrong_setting_is_one_line(folder, capsys, arguments, problem):
    assert main([str(folder), *arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert problem in shown.err


def test_files_that_do_not_suffice_are_one_line(folder, capsys, tmp_path):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    (folder / "logs" / "metrics.jsonl").write_text("\n".join(lines[:6]) + "\n")
    assert main([str(folder)]) == 2
    assert "10 steps or more are needed" in capsys.readouterr().err


def test_a_run_with_restarts_is_refused(folder):
    with (folder / "logs" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "restart", "role": "generator_0", "time": 1.0}) + "\n")
    with pytest.raises(UnfitError, match="restarted"):
        fit(folder)

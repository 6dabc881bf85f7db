"""What a run reports: metrics, throughput, evaluations, the summary and the report."""

import json
import math
import shlex
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from lib.rows import read_rows, write_rows
from omegaconf import OmegaConf

from grpo_components.config.open_run import open_log
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.records import run_log
from grpo_components.records.checkpoint_folder import point_latest
from grpo_tools.report import page
from grpo_tools.report.page import write_report


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=500.0)
    times = SimpleNamespace(perf_counter=lambda: clock.now, time=time.time)
    monkeypatch.setattr(run_log, "time", times)
    return clock


@pytest.fixture
def make(new_log, clock):
    return new_log


@pytest.fixture
def stepped(make, clock):
    """The log of a run that has trained one step."""
    log, _ = make()
    clock.now += 1
    log.step(1, step_metrics(), 100)
    return log


def step_metrics(reward=0.5, staleness=1.0, stalest=2):
    learned = dict.fromkeys(("rollout/reward_mean", "rollout/success_rate"), reward)
    return learned | {"staleness/mean": staleness, "staleness/max": stalest}


def eval_metrics(success=0.25, version=0):
    means = dict.fromkeys(("eval/success_rate", "eval/reward_mean"), success)
    return means | {"eval/policy_version": version, "eval/prompts": 40}


def records(tmp_path, name="metrics"):
    return read_rows(tmp_path / f"logs/{name}.jsonl")


def throughput(record):
    kinds = ("generated", "trained")
    return [record[f"throughput/{kind}_tokens_per_second"] for kind in kinds]


def close_during(log, error):
    try:
        raise error
    except BaseException:
        log.close()


# ---- steps and evaluations ----------------------------------------------------------------------


def test_the_display_shows_the_throughput_of_several_steps(make, clock, tmp_path, capsys):
    """Groups arrive between some steps only: the last step's alone would alternate with 0."""
    log, _ = make()
    for step in range(1, 5):
        clock.now += 1
        log.count_generated(100 * (step % 2))
        log.step(step, step_metrics(), 10)
    shown = [line.split("tokens/s ")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["100", "50", "67", "50"]
    assert [throughput(record) for record in records(tmp_path)] == [[100, 10], [0, 10]] * 2


@pytest.mark.parametrize("restored", [0, 4])
def test_throughput_includes_the_time_of_all_evaluations_but_the_first(
    make, clock, tmp_path, capsys, restored
):
    """An earlier attempt has logged the step of a restored policy: it is shown, not logged."""
    log, logger = make(attempt=int(restored > 0))
    clock.now += 1000
    log.count_generated(7)
    log.evaluation(restored, eval_metrics(success=0.5, version=restored))
    assert f"step {restored}: held-out success 0.500" in capsys.readouterr().out
    assert logger.log_dict.call_count == (not restored)
    clock.now += 4
    log.count_generated(80)
    log.step(restored + 1, step_metrics(), 40)
    clock.now += 3
    log.evaluation(restored + 2, eval_metrics(version=restored + 2))
    clock.now += 1
    log.step(restored + 2, step_metrics(), 20)
    logged = {r["step"]: throughput(r) for r in records(tmp_path) if "eval/prompts" not in r}
    assert logged == {restored + 1: [20, 10], restored + 2: [0, 5]}
    first, *others = records(tmp_path)
    assert len(others) == (1 if restored else 2)
    if not restored:
        facts = dict.fromkeys(("step", "attempt", "policy_version", "restarts"), 0)
        facts |= eval_metrics(success=0.5)
        assert facts.items() <= first.items() and first["time/wall_clock"] > 0


def test_sampled_groups_are_written_with_step_attempt_and_logprobs(make, tmp_path):
    """Group 7 is from a checkpoint, which has no text."""
    log, _ = make(attempt=2)
    entries = [LedgerEntry(group_id, {}, 0, 0, 0, 2) for group_id in (7, 8, 9, 10)]
    responses = [
        {"response": "é", "reward": math.nan},
        {"response": "3", "versions": np.array([1, 2])},
    ]
    answers = {"prompt": "2+2?", "responses": responses}
    logprobs = {id: [{"trainer_logprobs": [-id - i, None]} for i in (0, 0.5)] for id in (7, 9)}
    log.rollouts(3, entries, [None, {"prompt": "1+1?"}, answers], [0.5, 1.5, 2.5, 3.5], logprobs)
    assert records(tmp_path, "rollouts") == [
        {"step": 3, "attempt": 2, "group_id": 8, "prompt": "1+1?", "advantages": 1.5},
        {
            **{"step": 3, "attempt": 2, "group_id": 9, "prompt": "2+2?", "advantages": 2.5},
            "responses": [
                {"response": "é", "reward": None, "trainer_logprobs": [-9, None]},
                {"response": "3", "versions": [1, 2], "trainer_logprobs": [-9.5, None]},
            ],
        },
    ]


READABLE = {
    **{"response": "5", "finish_reason": "stop", "response_tokens": 1, "versions": [0, 0]},
    **{"reward_terms": {}, "success": True},
}


def answered(prompt, version, *rewards, logged=True):
    """Results of one prompt, as `Generator.evaluate` returns them."""
    for reward in rewards:
        error = "failed" if reward is None else None
        result = {"prompt_index": prompt, "prompt_text": f"{prompt}+1?", "error": error}
        result |= {"success": reward == 1, "reward": reward}
        result |= {"oldest_version": None if error else version}
        if logged:
            readable = READABLE | {"reward": reward, "error": error}
            result |= {"answer": f"{prompt + 1}", "readable": readable}
        yield result


def test_the_answers_and_the_success_of_an_evaluation_are_written_by_prompt(make, tmp_path):
    log, _ = make(attempt=1)
    results = [*answered(4, 7, None, 0.5), *answered(5, 7, 1, 1, logged=False), *answered(6, 7, 1)]
    log.evaluation_answers(10, results)
    first, second = records(tmp_path, "evaluation_answers")
    assert first == {
        **{"step": 10, "attempt": 1, "policy_version": 7, "prompt_index": 4},
        **{"prompt": "4+1?", "answer": "5"},
        "responses": [
            {**READABLE, "reward": None, "error": "failed"},
            {**READABLE, "reward": 0.5, "error": None},
        ],
    }
    assert second["prompt_index"] == 6 and len(second["responses"]) == 1
    [line] = records(tmp_path, "evaluations")
    assert line == {"step": 10, "attempt": 1, "prompt_index": [4, 5, 6], "success": [0, 1, 1]}


# ---- the summary --------------------------------------------------------------------------------


def shown(capsys):
    """The rows of the summary by label; only the first line of each."""
    lines = capsys.readouterr().out.splitlines()
    rows = (line.split("  ", 1) for line in lines if "  " in line.strip())
    return {label: value.strip() for label, value in rows}


def test_the_summary_has_the_key_figures_of_the_report(make, clock, tmp_path, capsys):
    log, _ = make(num_steps=30)
    log.evaluation(0, eval_metrics(success=0.25))
    for step in range(1, 31):
        clock.now += 2
        log.count_generated(300)
        reward = 0.1 if step <= 10 else 0.4 if step <= 20 else 0.9
        metrics = step_metrics(reward, staleness=step / 30, stalest=7 if step == 15 else 1)
        held_out = eval_metrics(success=0.75, version=30) if step == 30 else {}
        log.step(step, metrics | held_out | {"rollout/trained_tokens": 100}, 100)
    log.checkpoint(30, "/runs/a/checkpoints/step_30")
    capsys.readouterr()
    log.summary("", "2, the first was step 7")
    assert shown(capsys) == {
        "reward, first and last 10 steps": "0.10 \u2192 0.90",
        "success, first and last 10 steps": "0.10 \u2192 0.90",
        "held-out success": "0.250 \u2192 0.750",
        "staleness, mean and largest": "0.52, 7",
        "groups dropped": "none",
        "steps skipped": "2, the first was step 7",
        "generated tokens per second": "150",
        "trained tokens per second": "50",
        "checkpoint": "/runs/a/checkpoints/step_30",
        "metrics": str(tmp_path / "logs" / "metrics.jsonl"),
        "sample rollouts": str(tmp_path / "logs" / "rollouts.jsonl"),
    }


def test_eval_only_sums_up_the_confidence_interval_only_and_reports_its_answers(
    make, tmp_path, capsys
):
    log, _ = make(num_steps=1)
    log.evaluation_answers(0, [*answered(4, 0, 1.0)])
    ends = {"eval/success_rate_low": 0.125, "eval/success_rate_high": 0.5}
    log.evaluation(0, eval_metrics() | ends)
    log.summary()
    rows = shown(capsys)
    assert rows.pop("metrics")
    assert rows == {"held-out success": "0.250", "95 % confidence": "0.125 to 0.500"}
    log.close()
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "4+1?" in html and "<b>0.250</b><span>held-out success</span>" in html


@pytest.fixture
def cfg(tmp_path):
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger"}
    settings = {"log_every_n_steps": 1, "num_steps": 3, "log_level": "WARNING", "max_staleness": 2}
    settings |= {"output_dir": str(tmp_path), "trains": True}
    return OmegaConf.create({**settings, "metric_logger": logger | {"log_dir": str(tmp_path)}})


# ---- the end ------------------------------------------------------------------------------------


def test_close_writes_the_report_and_shows_its_path(make, stepped, tmp_path, capsys):
    log, _ = make()
    log.close()
    assert not (tmp_path / "report.html").exists(), "there is nothing to see yet"
    stepped.close()
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").stat().st_size > 1e6


def test_a_run_that_looks_ill_ends_with_a_line_that_says_so(make, clock, capsys, tmp_path):
    log, _ = make()
    for step in range(1, 6):
        clock.now += 1
        shares = dict.fromkeys(("rollout/cut_off_fraction", "rollout/zero_variance_fraction"), 1.0)
        log.step(step, step_metrics() | shares, 1)
    log.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("looks ill: responses are cut off: 100%")
    assert last.endswith(f" (1 more: grpo diagnose {tmp_path})")


def test_a_failed_report_is_shown_in_a_line_and_does_not_fail_the_run(
    make, clock, monkeypatch, capsys
):
    broken = Mock(side_effect=KeyError("a\nline of\x1b[31m a record"))
    monkeypatch.setattr(page, "write_report", broken)
    log, logger = make()
    clock.now += 1
    log.step(1, step_metrics(), 100)
    log.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert "report" in last and "KeyError: " in last and "\x1b" not in last
    logger.close.assert_called_once_with()


def write_starts(tmp_path, *attempts):
    start = {"event": "start", "num_steps": 9, "carried": {}, "time": 1.0, "cpus": 2}
    starts = (start | {"libraries": {}, "attempt": a, "steps_done": a} for a in attempts)
    write_rows(tmp_path / "receipts.jsonl", *starts)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RoleFailedError("trainer_0", "died <b>", "a.log", "died"), "trainer_0 died &lt;b&gt;"),
        (ExceptionGroup("loops", [KeyError("reward")]), "KeyError: &#39;reward&#39;"),
        (KeyboardInterrupt(), "interrupted; 1"),
    ],
)
def test_the_report_of_a_failed_run_has_the_error(stepped, tmp_path, error, shown):
    write_starts(tmp_path, 0)
    close_during(stepped, error)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert shown in html.partition("<main>")[0]
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert shown in html.partition("<main>")[0], "also when it is written again"


def test_an_attempt_that_fails_before_its_first_step_is_in_the_report(make, stepped, tmp_path):
    stepped.close()
    write_starts(tmp_path, 0, 1)
    close_during(make(attempt=1)[0], OSError("no such model"))
    assert "no such model" in (tmp_path / "report.html").read_text(encoding="utf-8")


def latest_in(folder):
    (checkpoint := folder / "checkpoints" / "step_4").mkdir(parents=True)
    point_latest(checkpoint)
    return checkpoint


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RoleFailedError("a", "died", "l", "died")])
def test_a_run_that_ends_early_tells_its_last_checkpoint_and_how_to_go_on(
    make, tmp_path, capsys, monkeypatch, error
):
    typed = ["run", "my_grpo.py", "--config", "mine.yaml", "output_dir=/runs/a b", "~lr_scheduler"]
    before = ["resume_from_checkpoint=/runs/b/step_2"]
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "/env/bin/tune", *typed, *before])
    close_during(make(resumable=True)[0], KeyboardInterrupt())
    (line,) = capsys.readouterr().out.splitlines()
    assert "checkpoint: none" in line
    checkpoint = latest_in(tmp_path)
    close_during(make(resumable=True)[0], error)
    last, command = capsys.readouterr().out.splitlines()[-2:]
    assert last.endswith(str(checkpoint))
    words = shlex.split(command.partition("to go on from it: ")[2])
    assert words == ["tune", *typed, "resume_from_checkpoint=true"]


def test_a_replay_goes_on_as_a_run_of_its_own(make, tmp_path, capsys, monkeypatch):
    """A resume refuses `replay_events`, whether it was typed or is in the config."""
    typed = ["/usr/bin/python", "/env/bin/tune", "run", "my_grpo.py", "replay_events=/runs/a"]
    monkeypatch.setattr(sys, "orig_argv", [*typed, "replay_until=3"])
    latest_in(tmp_path)
    log, _ = make(resumable=True, replay_events="/runs/a", replay_until=3)
    close_during(log, KeyboardInterrupt())
    words = shlex.split(capsys.readouterr().out.partition("to go on from it: ")[2])
    live = ["replay_events=null", "replay_until=null"]
    assert words == ["tune", "run", "my_grpo.py", *live, "resume_from_checkpoint=true"]


@pytest.mark.parametrize(
    ("resumable", "steps", "error"), [(False, 1, True), (True, 1, False), (True, 9, True)]
)
def test_a_run_without_checkpoints_or_without_steps_left_tells_no_command(
    make, clock, tmp_path, capsys, resumable, steps, error
):
    log, _ = make(num_steps=9, resumable=resumable)
    clock.now += 1
    log.step(steps, step_metrics(), 1)
    close_during(log, KeyboardInterrupt()) if error else log.close()
    assert "checkpoint" not in capsys.readouterr().out.replace(str(tmp_path), "")


# ---- the start ----------------------------------------------------------------------------------


class Prompts(list):
    """Prompts of one token each."""

    def __init__(self, *tokens, note=""):
        super().__init__({"prompt_ids": [token]} for token in tokens)
        self.note = note


@pytest.mark.parametrize(("trains", "held"), [(True, 2), (False, 2), (True, 4)])
def test_notes_on_the_data_are_shown_at_the_start(cfg, capsys, trains, held):
    cfg.trains = trains
    left_out = "dataset a: 2 prompts of 3 rows; 1 in other parts"
    dataset, held_out = Prompts(1, 2, note=left_out), Prompts(held, 3, note=left_out)
    open_log(cfg, EventOrder(), "moved aside", dataset, held_out).close()
    shared = ["eval_dataset: 1 of its 2 prompts are also trained on"]
    told = ["moved aside", left_out, f"eval_{left_out}", *shared * (trains and held == 2)]
    assert capsys.readouterr().out.splitlines() == told


# ---- phases and totals --------------------------------------------------------------------------


def test_the_phases_add_up_to_the_time_since_the_process_began(make, tmp_path):
    names = ("starting Ray", "training", "training")
    log, _ = make(attempt=2)
    for name in names:
        log.phase(name)
    log.close()
    lines = records(tmp_path, "phases")
    begun = [line["phase"] for line in lines[:4]]
    assert begun == ["imports, config and data", *names[:2], "report"]
    assert {line["attempt"] for line in lines} == {2}
    age = time.time() - psutil.Process().create_time()
    assert sum(line["seconds"] for line in lines) == pytest.approx(age, abs=1)


def test_a_full_disk_does_not_keep_the_run_from_ending(make, tmp_path):
    log, logger = make()
    (tmp_path / "logs/phases.jsonl").symlink_to("/dev/full")
    log.phase("closing roles")
    log.close()
    logger.close.assert_called_once_with()


def test_restarts_of_a_role_and_of_all_trainers_count_and_a_role_given_up_does_not(
    make, clock, tmp_path
):
    log, _ = make(events=(events := EventOrder()))
    events.record("restart", role="generator_0", what="died", given_up=False)
    events.note("rollback", role="trainer_0", what="died")
    events.note("restart", role="trainer_0", what="died")  # while the roles start
    events.record("restart", role="generator_1", what="died", given_up=True)
    events.record("issue", role="generator_0", group=1)
    clock.now += 1
    log.step(1, step_metrics(), 100)
    [record] = records(tmp_path)
    assert record["restarts"] == 3 and record["time/wall_clock"] > 0


def test_the_time_of_a_resumed_run_goes_on_from_its_logs(make, clock, tmp_path):
    steps = [{"step": s, "time/wall_clock": took} for s, took in ((1, 50.0), (2, 90.0), (1, 70.0))]
    torn = '{"step": 2, "time/wall_clock": 9\n'
    path = write_rows(tmp_path / "logs/metrics.jsonl", {"step": 0}, *steps, torn=torn)
    log, _ = make()
    clock.now += 1
    log.step(1, step_metrics(), 100)
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["time/wall_clock"], last["restarts"]) == (91.0, 0)

"""The staleness atlas goes on where it was killed, and its page hides nothing that failed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import staleness_atlas
import staleness_runs
from staleness_atlas import go_on, main
from staleness_lines import OBJECTIVES, ORDER, STALENESS, Cell, Line, append, read, text_of
from staleness_map import Atlas
from staleness_page import page
from staleness_runs import Interrupted, audit_of, line_of, run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHORT = ("num_steps=3", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=4")
REAL = """
import sys
from pathlib import Path
from staleness_lines import Cell, append
from staleness_runs import preload, run
folder = Path(sys.argv[1])
preload()
cell = Cell("truncated IS", 2, "4e-4", 1)
append(folder / "runs.csv", run(cell, folder / cell.folder, sys.argv[2:]))
"""


def line(cell, after=0.6, **changed):
    given = line_of(cell, [], "", "", 26.0)
    figures = {"steps": 32, "before": 0.35, "after": after, "staleness": 3.0, "oldest": 4}
    return dataclasses.replace(given, **{**figures, "skipped": 0, "dropped": 0, **changed})


def lines(objective, bound, rate, *after):
    return [
        line(Cell(objective, bound, rate, seed), each) for seed, each in enumerate(after, start=1)
    ]


def test_every_beginning_of_the_order_is_a_map():
    assert len(set(ORDER)) == len(ORDER) == 225
    assert len({cell.job for cell in ORDER}) == len({cell.folder for cell in ORDER}) == 225
    assert {cell.seed for cell in ORDER[:75]} == {1}
    for start in range(0, 225, 5):
        assert [cell.objective for cell in ORDER[start : start + 5]] == list(OBJECTIVES)
    assert {cell.max_staleness for cell in ORDER[:30]} == {STALENESS[0], STALENESS[-1]}


def test_objectives_with_a_preset_are_those_of_the_docs():
    docs = (ROOT / "docs" / "objectives.md").read_text()
    for objective in ("GSPO", "decoupled PPO", "REINFORCE"):
        assert " ".join(OBJECTIVES[objective]) in docs


def test_lines_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "runs.csv"
    first = line(ORDER[0], ended='step 3: "nan", twice', audit="broken: parses: a, b")
    second = line(ORDER[1], None, staleness=None, oldest=None, skipped=None, dropped=None)
    for each in (first, second):
        append(file, each)
    assert read(file) == {ORDER[0]: first, ORDER[1]: second}
    file.write_text(file.read_text() + text_of([line(ORDER[2])], header=False).rstrip("\n")[:-9])
    assert read(file) == {ORDER[0]: first, ORDER[1]: second}


@pytest.mark.parametrize("changed", [{"job": "0" * 8}, {"seed": 99}, {"objective": "PPO"}])
def test_results_of_another_job_are_refused_and_not_mixed_in(tmp_path, changed, capsys):
    file = tmp_path / "staleness.csv"
    file.write_text(text_of([line(ORDER[0]), dataclasses.replace(line(ORDER[1]), **changed)]))
    with pytest.raises(ValueError, match=r"staleness\.csv line 3 is no result of this atlas"):
        read(file)
    output = tmp_path / "staleness.md"
    given = ["--runs", "0", "--folder", str(tmp_path / "runs"), "--output", str(output)]
    assert main(given) == 2
    assert "line 3" in capsys.readouterr().err and not output.exists()


def test_a_columns_name_that_changed_is_refused(tmp_path):
    file = tmp_path / "staleness.csv"
    file.write_text(text_of([line(ORDER[0])]).replace("staleness,", "lag,", 1))
    with pytest.raises(ValueError, match="line 2 is no result"):
        read(file)


@pytest.mark.parametrize(
    ("moment", "finished"),
    [("in the run", 2), ("before the line is kept", 2), ("before the page", 3)],
)
def test_killed_at_any_moment_it_goes_on_and_makes_no_finished_run_again(
    tmp_path, moment, finished, monkeypatch
):
    made, output, parent = tmp_path / "made", tmp_path / "staleness.md", os.getpid()
    write = staleness_atlas.write

    def die_at(here):
        if here == moment and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    def make(cell, folder):
        folder.mkdir(exist_ok=True)
        with made.open("a") as file:
            file.write(f"{cell.folder}\n")
        if cell == ORDER[2]:
            die_at("in the run")
        return line(cell)

    def append_later(path, each):
        if each.cell == ORDER[2]:
            die_at("before the line is kept")
        append(path, each)

    def write_later(to, known):
        if ORDER[2] in known:
            die_at("before the page")
        write(to, known)

    monkeypatch.setattr(staleness_atlas, "append", append_later)
    monkeypatch.setattr(staleness_atlas, "write", write_later)
    if not (child := os.fork()):
        go_on(make, tmp_path, output, 5, str)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(read(tmp_path / "runs.csv")) == list(ORDER[:finished])
    go_on(make, tmp_path, output, 2, str)
    expected = [*ORDER[:3], *ORDER[finished : finished + 2]]
    assert made.read_text().splitlines() == [cell.folder for cell in expected]
    known = read(tmp_path / "runs.csv")
    assert list(known) == list(ORDER[: finished + 2])
    assert read(output.with_suffix(".csv")) == known
    assert f"**{len(known)} of 225 runs are done" in output.read_text()


def test_a_clone_goes_on_from_the_results_beside_the_page(tmp_path):
    output, said = tmp_path / "docs" / "staleness.md", []
    output.parent.mkdir()
    output.with_suffix(".csv").write_text(text_of([line(ORDER[0]), line(ORDER[2])]))
    (tmp_path / "runs").mkdir()
    append(tmp_path / "runs" / "runs.csv", line(ORDER[1], 0.1))
    go_on(lambda cell, folder: line(cell), tmp_path / "runs", output, 1, said.append)
    assert list(read(output.with_suffix(".csv"))) == list(ORDER[:4])
    assert len(said) == 1 and said[0].startswith(f"4/225 {ORDER[3].folder}: held-out success")


def test_two_atlases_do_not_work_in_one_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(staleness_atlas, "_LOCK_S", 0.0)
    given = ["--folder", str(tmp_path), "--output", str(tmp_path / "page.md")]
    with staleness_atlas._alone(tmp_path):
        assert main(given) == 2
        assert "another atlas is at work" in capsys.readouterr().err
        assert main([*given, "--runs", "0"]) == 0


def test_a_run_that_ends_early_is_a_result_with_its_cause(tmp_path, monkeypatch):
    records = [{"step": 0, "eval/success_rate": 0.35}, {"step": 1, "rollout/reward_mean": 0.25}]

    def failed(overrides, log):
        folder = tmp_path / ORDER[0].folder
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "metrics.jsonl").write_text(
            "\n".join(map(json.dumps, records)) + '\n{"st'
        )
        (folder / "report.html").write_text("large")
        log.write_text("error: 10 steps in a row were skipped\nmetrics  somewhere\n")
        return 1, 12.34

    monkeypatch.setattr(staleness_runs, "_tune", failed)
    found = run(ORDER[0], tmp_path / ORDER[0].folder)
    assert found.ended == "error: 10 steps in a row were skipped"
    assert (found.steps, found.before, found.after, found.cpu_s) == (1, 0.35, None, 12.3)
    assert found.audit.startswith("no receipts in")
    left = [path.name for path in (tmp_path / ORDER[0].folder).rglob("*") if path.is_file()]
    assert left == ["metrics.jsonl"]


def test_a_run_without_memory_is_made_again_by_the_next_call(tmp_path, monkeypatch):
    def full(overrides, log):
        log.write_text("error: trainer_0 died: killed because the machine's memory was full\n")
        return 1, 9.0

    monkeypatch.setattr(staleness_runs, "_tune", full)
    said, output = [], tmp_path / "staleness.md"
    go_on(run, tmp_path, output, 2, said.append)
    assert len(said) == 2 and "no result, because the machine's memory was full" in said[0]
    assert read(output.with_suffix(".csv")) == {}
    go_on(lambda cell, folder: line(cell), tmp_path, output, 2, said.append)
    assert list(read(output.with_suffix(".csv"))) == list(ORDER[:2])


def test_steps_that_were_rolled_back_count_once():
    steps = [(1, 0, 0.0), (2, 0, 0.0), (1, 1, 0.5), (2, 1, 0.7), (3, 1, 0.6)]
    records = [{"step": s, "attempt": a, "rollout/reward_mean": r} for s, a, r in steps]
    found = line_of(ORDER[0], records, "", "", 1.0)
    assert (found.steps, found.reward) == (3, 0.6)


@pytest.mark.parametrize("code", [-9, 2, 129, 130, 143])
def test_a_run_that_was_ended_from_outside_is_no_result(tmp_path, monkeypatch, code):
    def ended(overrides, log):
        log.write_text("config error: seed: is 'x'\n")
        return code, 1.0

    monkeypatch.setattr(staleness_runs, "_tune", ended)
    with pytest.raises(Interrupted, match=r"(?s)config error: seed.*exit code"):
        run(ORDER[0], tmp_path / ORDER[0].folder)


def test_the_page_hides_no_failed_run_and_no_failed_audit():
    text = page(
        [
            line(Cell("GRPO", 4, "8e-4", 1), None, ended="error: it is nan", steps=7, restarts=3),
            line(Cell("GSPO", 4, "8e-4", 1), audit="broken: sequence: step 3", skipped=2),
            *lines("GRPO", 0, "8e-4", 0.5),
        ]
    )
    assert "Audits that failed: 1 of 3" in text
    assert "GRPO_staleness_4_lr_8e-4_seed_1, step 7: ended early: `error: it is nan`" in text
    assert "step 32: the audit failed: `broken: sequence: step 3`" in text
    assert "step 32: 2 steps skipped" in text and "step 7: 3 roles were started again" in text
    assert "○ 0.00<br>s 3.0<br>n 1<br>**ended early**" in text
    assert "● 0.60<br>s 3.0<br>n 1<br>**audit failed**" in text
    assert "does not tolerate 4: GRPO;" in text
    assert text.count("not run") > 70


def test_the_map_has_means_with_intervals_and_the_number_of_runs():
    spot = Atlas(lines("GRPO", 2, "2e-4", 0.5, 0.6, 0.7)).spot("GRPO", 2, "2e-4")
    assert spot.interval == pytest.approx((0.6 - 0.43 / 3**0.5, 0.6 + 0.43 / 3**0.5), abs=1e-3)
    text = page(lines("GRPO", 2, "2e-4", 0.5, 0.6, 0.7) + lines("GSPO", 2, "2e-4", 0.2, 0.6))
    assert "| ● 0.60 (0.35..0.85)<br>s 3.0<br>n 3 |" in text
    assert "| ◐ 0.40 (0.00..1.00)<br>s 3.0<br>n 2 |" in text
    assert "| GRPO | · · · | · · · | ● · · | · · · | · · · |" in text
    assert "**5 of 225 runs are done; 1 of 75 places" in text


def test_equal_algorithms_without_staleness_are_compared():
    found = lines("GRPO", 0, "2e-4", 0.7, 0.6) + lines("REINFORCE", 0, "2e-4", 0.7, 0.5)
    assert "are equal in 1 of 2 pairs" in page(found)


def test_the_answer_and_the_verdicts_follow_from_the_figures():
    found = [
        *(lines("GRPO", 0, "2e-4", 0.75) + lines("GRPO", 8, "2e-4", 0.66)),
        *(lines("GRPO", 0, "8e-4", 0.75) + lines("GRPO", 2, "8e-4", 0.7)),
        *(lines("GRPO", 4, "8e-4", 0.6) + lines("GRPO", 8, "8e-4", 0.2)),
        *(lines("REINFORCE", 0, "8e-4", 0.44) + lines("REINFORCE", 8, "8e-4", 0.3)),
    ]
    text = page(found)
    assert "not known yet: GSPO, truncated IS, decoupled PPO, REINFORCE; " in text
    assert "tolerates 8: GRPO. At a bound of 8, from best to worst: GRPO 0.66." in text
    assert "**At 8e-4** (seeds per place: 1) breaks without staleness: REINFORCE; " in text
    assert "tolerates 2: GRPO. At a bound of 8, from best to worst: REINFORCE 0.30, GRPO 0." in text
    assert "| right in 1 of 1 |" in text and "| right in 2 of 2 |" in text
    assert "| **wrong** in 1 of 1: 0.20 against 0.30 of REINFORCE at 8e-4 |" in text
    assert text.count("| not run yet |") == 2


def started(script, *arguments):
    return subprocess.Popen(
        [sys.executable, *script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_real_run_reaches_its_staleness_and_what_is_kept_passes_the_audit_again(tmp_path):
    process = started(("-c", REAL), tmp_path, *SHORT, "rollouts_in_flight=6")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    cell = Cell("truncated IS", 2, "4e-4", 1)
    found = read(tmp_path / "runs.csv")[cell]
    assert isinstance(found, Line) and (found.steps, found.ended, found.audit) == (3, "", "")
    assert 1 <= found.oldest <= 2 and 0 < found.staleness < 2
    assert found.after is not None and found.cpu_s > 3
    kept = {p.relative_to(tmp_path / cell.folder) for p in (tmp_path / cell.folder).rglob("*.*")}
    names = ("receipts.jsonl", "receipts.end", "config.yaml", "logs/metrics.jsonl")
    assert kept == set(map(Path, names))
    assert audit_of(tmp_path / cell.folder, unfinished=False) == ""


@pytest.mark.nightly
def test_an_atlas_that_is_killed_in_a_run_makes_that_run_again(tmp_path):
    output = tmp_path / "staleness.md"
    given = ("--runs", 1, "--folder", tmp_path / "runs", "--output", output)
    first = started((BENCHMARKS / "staleness_atlas.py",), *given)
    log = tmp_path / "runs" / f"{ORDER[0].folder}.log"
    deadline = time.monotonic() + 240
    while not (log.exists() and "\nstep " in log.read_text()):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    first.kill()
    first.wait()
    assert read(tmp_path / "runs" / "runs.csv") == {}
    second = started((BENCHMARKS / "staleness_atlas.py",), *given)
    said, _ = second.communicate(timeout=400)
    assert second.returncode == 0, said
    (found,) = read(tmp_path / "runs" / "runs.csv").values()
    assert (found.cell, found.steps, found.ended, found.audit) == (ORDER[0], 32, "", "")
    assert [p.name for p in (tmp_path / "runs").iterdir() if p.is_dir()] == [ORDER[0].folder]
    assert "**1 of 225 runs are done" in output.read_text()

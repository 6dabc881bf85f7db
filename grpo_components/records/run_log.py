"""Reports a run: to its log files, to the metric logger and to the user."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from numpy.typing import NDArray
from torchtune.training.metric_logging import MetricLoggerInterface

from grpo_components.cluster.supervision import root_cause
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.files import FAILURES, STEPS_PER_END, append_line, records_of
from grpo_components.records.checkpoint_folder import latest
from grpo_components.records.metrics import MetricLog
from grpo_components.records.progress import Progress
from grpo_components.records.step_metrics import mean

STEPS_SHOWN = 10
"""Number of steps over which the display averages the throughput."""
_RESTARTS = ("restart", "rollback")
_WALL_CLOCK = "time/wall_clock"
_STOP_REPORT_S = 60.0


class RunLog:
    """Logs metrics, sampled rollouts and progress of one run."""

    def __init__(
        self,
        output_dir: Path,
        metric_logger: MetricLoggerInterface,
        log_every_n_steps: int,
        num_steps: int,
        attempt: int,
        *,
        resumable: bool = False,
    ) -> None:
        prints = type(metric_logger).__name__ == "StdoutLogger"
        self._metric_log = MetricLog(str(output_dir), metric_logger, log_every_n_steps)
        self._progress = Progress(num_steps, plain=prints)
        self._output_dir, self._logs, self.attempt = output_dir, output_dir / "logs", attempt
        self._first_rewards: list[float] = []
        self._last_rewards: deque[float] = deque(maxlen=STEPS_PER_END)
        self._steps = self._stalest = self._steps_before = 0
        self._staleness = 0.0
        self._evaluations: list[Mapping[str, float]] = []
        """The first and the last one."""
        self._checkpoint, self._resumable = "", resumable
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=STEPS_SHOWN)
        """Seconds, generated and trained tokens of the last steps."""
        self._num_steps = self._steps_left = num_steps
        self._started = self._last = time.perf_counter()
        self._generated_tokens = self._counted_tokens = 0
        self._trained_tokens = 0.0
        self._live_report = LiveReport(output_dir, self._progress.note)
        logged = records_of(self._logs / "metrics.jsonl", f'"{_WALL_CLOCK}": '.encode())
        earlier_s = max((record.get(_WALL_CLOCK) or 0 for record in logged), default=0)
        self._began, self._restarts = time.perf_counter() - earlier_s, 0
        self.note = self._progress.note
        self._phases = Phases(self._logs / "phases.jsonl", attempt)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Count an event of the run if it restarts a role, or all trainers together."""
        self._restarts += event["event"] in _RESTARTS and not event.get("given_up")

    def _totals(self) -> dict[str, float]:
        """Return the seconds of all attempts, start-up included, and the restarts of this one."""
        return {_WALL_CLOCK: time.perf_counter() - self._began, "restarts": self._restarts}

    def phase(self, name: str, *, shown: bool = False) -> None:
        """Begin a phase of the run's start or end."""
        self._phases.begin(name)
        if shown:
            self._progress.phase(name)

    def step(self, step: int, metrics: dict[str, float], trained_tokens: int) -> None:
        """Log a finished step; throughput is per second of wall time, including evaluations."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        generated = self._generated_tokens - self._counted_tokens
        self._counted_tokens = self._generated_tokens
        metrics |= _throughput(seconds, generated, trained_tokens)
        self._trained_tokens += trained_tokens
        if not self._steps:
            self._steps_before = step - 1  # above 0 in a resumed run
        self._keep(metrics)
        self._steps_left = self._num_steps - step
        self._metric_log.log(step, {"attempt": self.attempt, **metrics, **self._totals()})
        self._phases.begin("training")
        # Groups arrive between some steps only, so the last step's throughput alone would jump.
        self._recent.append((seconds, generated, trained_tokens))
        recent = _throughput(*(sum(column) for column in zip(*self._recent, strict=True)))
        self._progress.update(step, metrics | recent)
        self._live_report.start()

    def _keep(self, metrics: Mapping[str, float]) -> None:
        """Keep what the summary needs of a step: not its metrics, as a run may have many."""
        self._steps += 1
        self._staleness += metrics["staleness/mean"]
        self._stalest = max(self._stalest, metrics["staleness/max"])
        self._last_rewards.append(metrics["rollout/reward_mean"])
        if self._steps <= STEPS_PER_END:
            self._first_rewards.append(metrics["rollout/reward_mean"])

    def count_generated(self, tokens: int) -> None:
        """Count tokens that were sampled for training."""
        self._generated_tokens += tokens

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation to the user, and log the one before the first step as step 0."""
        if not self._evaluations:  # before the attempt's first step: throughput counts from here
            self._started = self._last = time.perf_counter()
            self._generated_tokens = self._counted_tokens = 0
        self._evaluations[1:] = [metrics]
        version = metrics["eval/policy_version"]
        if step == 0:
            record = {"attempt": self.attempt, "policy_version": version, **metrics}
            self._metric_log.log(0, record | self._totals())
            self._progress.update(0, metrics)
            self._live_report.start()
        success, prompts = metrics["eval/success_rate"], metrics["eval/prompts"]
        self.note(
            f"step {step}: held-out success {success:.3f} on {prompts} prompts "
            f"(policy version {version})"
        )

    def evaluation_answers(self, step: int, results: Sequence[Mapping[str, Any]]) -> None:
        """Log an evaluation's success by prompt, and answers as text, one line per prompt."""
        versions = (result["oldest_version"] for result in results)
        version = next((version for version in versions if version is not None), None)
        lines: dict[int, dict[str, Any]] = {}
        success: dict[int, list[bool]] = {}
        for result in results:
            if result["error"] is None:
                success.setdefault(result["prompt_index"], []).append(result["success"])
            if "readable" in result:
                index, prompt = result["prompt_index"], result["prompt_text"]
                line = {"attempt": self.attempt, "policy_version": version, "prompt_index": index}
                line |= {"prompt": prompt, "answer": result["answer"], "responses": []}
                lines.setdefault(index, line)["responses"].append(result["readable"])
        means = {index: sum(each) / len(each) for index, each in sorted(success.items())}
        of_prompts = {"attempt": self.attempt, "prompt_index": [*means]}
        of_prompts["success"] = [*means.values()]
        self._metric_log.log_answers(step, list(lines.values()), of_prompts)

    def rollouts(
        self,
        step: int,
        entries: Sequence[LedgerEntry],
        texts: Sequence[Mapping[str, Any] | None],
        advantages: NDArray[Any],
        token_logprobs: Mapping[int, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Log the first groups of a step as text, with advantages and what logprobs are there.

        A text is None where it was lost. `token_logprobs`: group id -> those of each response.
        """
        groups: list[dict[str, Any]] = []
        for entry, text, row in zip(entries, texts, advantages, strict=False):
            if text is None:
                continue
            group = {"attempt": self.attempt, "group_id": entry.group_id, **text, "advantages": row}
            if found := token_logprobs.get(entry.group_id):
                both = zip(text["responses"], found, strict=True)
                group["responses"] = [{**response, **logprobs} for response, logprobs in both]
            groups.append(group)
        self._metric_log.log_rollouts(step, groups)

    def checkpoint(self, step: int, folder: str) -> None:
        """Show that a checkpoint was saved."""
        self._checkpoint = folder
        self.note(f"step {step}: saved {folder}")

    def summary(
        self,
        dropped_groups: Mapping[str, int],
        replay: str = "",
        skipped_steps: str = "",
    ) -> None:
        """Show the closing summary: a row of label and value for each thing to tell."""
        rows = {"held-out success": self._change_of_success()}
        if self._steps:
            dropped = ", ".join(f"{count} {why}" for why, count in sorted(dropped_groups.items()))
            seconds = self._last - self._started
            generated, trained = self._generated_tokens / seconds, self._trained_tokens / seconds
            rows = {
                "reward": self._change_of_reward(),
                **rows,
                "staleness": f"{self._staleness / self._steps:.2f} policy versions on average, "
                f"{self._stalest:.0f} at most",
                "groups dropped": dropped or "none",
                "books": self._books(),
                "steps skipped": skipped_steps,
                "replay": replay,
                "tokens per second": f"{generated:,.0f} generated, {trained:,.0f} trained",
                "checkpoint": self._checkpoint or "none",
            }
        rows["metrics"] = str(self._logs / "metrics.jsonl")
        if self._steps:
            rows["sample rollouts"] = str(self._logs / "rollouts.jsonl")
        self._progress.summary([(label, value) for label, value in rows.items() if value])

    def _books(self) -> str:
        """Return a table of what became of all groups and tokens; empty without receipts."""
        from grpo_tools.books import close_books  # a tool, which the core imports only here

        if not (self._output_dir / "receipts.jsonl").exists():
            return ""
        try:
            books = close_books(self._output_dir)
        except (OSError, ValueError) as error:
            return f"not closed: {error}"
        lines = [f"{'groups':>9} {'tokens':>13}"]
        lines += [f"{groups:>9,} {tokens:>13,}  {what}" for what, groups, tokens in books.table()]
        return "\n".join([*lines, *books.beside()])

    def _change_of_reward(self) -> str:
        number = max(1, min(STEPS_PER_END, self._steps // 2))
        start, end = mean(self._first_rewards[:number]), mean([*self._last_rewards][-number:])
        of_steps = f"means of {number} steps" if number > 1 else "one step each"
        since = f"after step {self._steps_before}" if self._steps_before else "at the start"
        return f"{start:.2f} {since}, {end:.2f} at the end ({of_steps})"

    def _change_of_success(self) -> str:
        if not self._evaluations:
            return ""
        first, last = self._evaluations[0], self._evaluations[-1]
        before, after = (each["eval/success_rate"] for each in (first, last))
        if not self._steps:  # eval_only
            low, high = (first[f"eval/success_rate_{end}"] for end in ("low", "high"))
            return f"{before:.3f}, 95 % confidence interval {low:.3f} to {high:.3f}"
        since = f"at step {self._steps_before}" if self._steps_before else "before"
        return f"{before:.3f} {since}, {after:.3f} after"

    def close(self) -> None:
        """End the display, close the files and the logger, and write the report.

        An error that is ending the run is first written to `logs/failures.jsonl`, for the report.
        Last, the user sees how to go on from the last checkpoint.
        """
        if (error := sys.exception()) is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._write_failure(error)
        self._phases.begin("report")
        self._progress.close()
        self._live_report.stop()
        self._metric_log.close()
        if self._steps or self._evaluations or self.attempt:
            self._report()
        self._phases.end()
        if error is not None and self._steps and (books := self._books()):
            self._progress.summary([("books", books)])
        if error is not None and self._resumable and self._steps_left:
            checkpoint = latest(self._output_dir / "checkpoints")
            none = "none, the run ended before the first one was saved"
            self.note(f"last checkpoint: {checkpoint or none}")
            if checkpoint:
                self.note("to go on from it: the same command with resume_from_checkpoint=true")

    def _report(self) -> None:
        from grpo_tools.diagnose.rules import worst_of
        from grpo_tools.report.page import write_report  # once there is a run to show
        from grpo_tools.report.run_files import NoStepsError

        try:
            self.note(f"report: {write_report(self._output_dir)}")
            if ill := worst_of(self._output_dir):
                self.note(ill)
        except NoStepsError:  # earlier attempts have no steps either
            return
        except Exception as error:  # a failed report must not change how the run ended
            self.note(f"the report could not be written: {type(error).__name__}: {error}")

    def _write_failure(self, error: BaseException) -> None:
        cause = root_cause(error)
        text: str | None = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, RoleFailedError):
            text = str(cause)
        elif isinstance(cause, KeyboardInterrupt):
            text = None
        _append(self._logs / FAILURES, {"attempt": self.attempt, "error": text})


class LiveReport:
    """Has a child process rewrite a run's `report.html` on a clock; the page reloads itself.

    The child ends when its standard input is closed, also by the driver's death. What goes wrong
    is in `logs/report.log`, and does not disturb the run.
    """

    def __init__(self, output_dir: Path, note: Callable[[str], None]) -> None:
        self._output_dir, self._note = output_dir, note
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to write pages, unless started already."""
        if self._child is not None:
            return
        command = [sys.executable, "-m", "grpo_tools.report.live", str(self._output_dir)]
        with (self._output_dir / "logs" / "report.log").open("ab") as log:
            self._child = subprocess.Popen(  # Ctrl-C reaches the driver, which stops it
                command, stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """Write no more pages; return once the page that is being written is finished."""
        if self._child is None or self._child.stdin is None:
            return
        self._child.stdin.close()
        try:
            self._child.wait(_STOP_REPORT_S)
        except subprocess.TimeoutExpired:
            late = f"the live report is still being written after {_STOP_REPORT_S:g} s"
            self._note(f"{late}: it is stopped")
            self._child.kill()
            self._child.wait()


class Phases:
    """Writes what each phase took to a file.

    The first phase began with the process: imports, the check of the config, and the data.
    """

    def __init__(self, file: Path, attempt: int) -> None:
        self._file, self._attempt = file, attempt
        self._name, self._began = "imports, config and data", psutil.Process().create_time()

    def begin(self, name: str) -> None:
        """End the present phase and begin another; do nothing if that is the present one."""
        if name != self._name:
            self.end()
            self._name = name

    def end(self) -> None:
        """End the present phase."""
        now = time.time()
        seconds, self._began = round(now - self._began, 3), now
        with contextlib.suppress(OSError):  # a full disk must not keep the run from ending
            self._file.parent.mkdir(parents=True, exist_ok=True)
            record = {"attempt": self._attempt, "phase": self._name, "seconds": seconds}
            _append(self._file, record)


def _throughput(seconds: float, generated: float, trained: float) -> dict[str, float]:
    return {
        "throughput/generated_tokens_per_second": generated / seconds,
        "throughput/trained_tokens_per_second": trained / seconds,
    }


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        append_line(file, json.dumps(record))

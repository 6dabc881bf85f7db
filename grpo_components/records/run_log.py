"""Reports a run: to its log files, to the metric logger and to the user."""

from __future__ import annotations

import contextlib
import math
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from numpy.typing import NDArray
from torchtune.training.metric_logging import MetricLoggerInterface, WandBLogger

from grpo_components.cluster.supervision import root_cause
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.files import ANSWERS, EVALUATIONS, FAILURES, append_record, records_of
from grpo_components.records.checkpoint_folder import latest
from grpo_components.records.metrics import as_json, log_rollout_table
from grpo_components.records.progress import Progress
from grpo_components.settings import Settings

STEPS_SHOWN = 10
"""Number of steps over which the display averages the throughput."""
_RESTARTS = ("restart", "rollback")
_WALL_CLOCK = "time/wall_clock"
_FIRST_PHASE = "imports, config and data"
_STOP_REPORT_S = 60.0


class RunLog:
    """Logs a run's metrics, the texts of some rollouts, and the run's progress.

    Every step goes to files in `logs/`. The metric logger gets every `log_every_n_steps`-th step,
    and each step with an evaluation's metrics.
    """

    def __init__(
        self, cfg: Settings, metric_logger: MetricLoggerInterface, events: EventOrder
    ) -> None:
        prints = type(metric_logger).__name__ == "StdoutLogger"
        self._cfg, self._metric_logger, self._events = cfg, metric_logger, events
        self._progress = Progress(cfg.num_steps, plain=prints)
        self._output_dir = Path(cfg.output_dir)
        self._logs = self._output_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._steps, self._evaluated, self._checkpoint = 0, False, ""
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=STEPS_SHOWN)
        """Seconds, generated and trained tokens of the last steps."""
        self._steps_left = cfg.num_steps
        self._last = time.perf_counter()
        self._tokens_since_step = 0
        self._live_report = LiveReport(self._output_dir, self._progress.note)
        logged = records_of(self._logs / "metrics.jsonl", f'"{_WALL_CLOCK}": '.encode())
        earlier_s = max((record.get(_WALL_CLOCK) or 0 for record in logged), default=0)
        self._began, self._restarts = time.perf_counter() - earlier_s, 0
        self.note = self._progress.note
        # The first phase began with the process, whose phases all count for its first attempt.
        self._phase, self._phase_began = _FIRST_PHASE, psutil.Process().create_time()
        self._first_attempt = events.attempt
        events.listen(self._follow)

    def _follow(self, event: Mapping[str, Any]) -> None:
        """Count an event if it is a restart of a role, or a rollback (all trainers restart)."""
        self._restarts += event["event"] in _RESTARTS and not event.get("given_up")

    def phase(self, name: str, *, shown: bool = False) -> None:
        """Begin a phase such as "training", unless it has begun; log the previous one's seconds."""
        if name != self._phase:
            self._end_phase()
            self._phase = name
        if shown:
            self._progress.phase(name)

    def _end_phase(self) -> None:
        now = time.time()
        seconds, self._phase_began = round(now - self._phase_began, 3), now
        record = {"attempt": self._first_attempt, "phase": self._phase, "seconds": seconds}
        with contextlib.suppress(OSError):  # a full disk must not keep the run from ending
            append_record(self._logs / "phases.jsonl", record)

    def step(self, step: int, metrics: dict[str, float], trained_tokens: int) -> None:
        """Log a step's metrics, and tokens per second of wall time, which includes evaluations."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        generated, self._tokens_since_step = self._tokens_since_step, 0
        metrics |= _throughput(seconds, generated, trained_tokens)
        self._steps += 1
        self._steps_left = self._cfg.num_steps - step
        self._log(step, metrics)
        self.phase("training")
        # Groups arrive between some steps only, so the last step's throughput alone would jump.
        self._recent.append((seconds, generated, trained_tokens))
        recent = _throughput(*(sum(column) for column in zip(*self._recent, strict=True)))
        self._progress.update(step, metrics | recent)
        self._live_report.start()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, the total seconds of all attempts, and this process's restarts."""
        totals = {_WALL_CLOCK: time.perf_counter() - self._began, "restarts": self._restarts}
        values = as_json({"attempt": self._events.attempt, **metrics, **totals})
        append_record(self._logs / "metrics.jsonl", {"step": step, **values})
        evaluated = any(key.startswith("eval/") for key in values)
        if step % self._cfg.log_every_n_steps == 0 or evaluated:
            # TensorBoard and W&B show NaN as a gap, but refuse null.
            payload = {key: math.nan if value is None else value for key, value in values.items()}
            with _named(step):
                self._metric_logger.log_dict(payload, step)

    def count_generated(self, tokens: int) -> None:
        """Count tokens that were sampled for training, to log the throughput of generation."""
        self._tokens_since_step += tokens

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation's success rate; log step 0's metrics, which no training step logs."""
        if not self._evaluated:  # before the attempt's first step: throughput counts from here
            self._last = time.perf_counter()
            self._tokens_since_step = 0
        self._evaluated = True
        version = metrics["eval/policy_version"]
        if step == 0:
            self._log(0, {"policy_version": version, **metrics})
            self._progress.update(0, metrics)
            self._live_report.start()
        success, prompts = metrics["eval/success_rate"], metrics["eval/prompts"]
        self.note(
            f"step {step}: held-out success {success:.3f} on {prompts} prompts "
            f"(policy version {version})"
        )

    def evaluation_answers(self, step: int, results: Sequence[Mapping[str, Any]]) -> None:
        """Log an evaluation's success rate on each prompt, and the responses to some prompts."""
        versions = (result["oldest_version"] for result in results)
        version = next((version for version in versions if version is not None), None)
        lines: dict[int, dict[str, Any]] = {}
        success: dict[int, list[bool]] = {}
        for result in results:
            if result["error"] is None:
                success.setdefault(result["prompt_index"], []).append(result["success"])
            if "readable" in result:
                index, prompt = result["prompt_index"], result["prompt_text"]
                line = {"policy_version": version, "prompt_index": index}
                line |= {"prompt": prompt, "answer": result["answer"], "responses": []}
                lines.setdefault(index, line)["responses"].append(result["readable"])
        means = {index: sum(each) / len(each) for index, each in sorted(success.items())}
        of_prompts = {"prompt_index": [*means], "success": [*means.values()]}
        where = {"step": step, "attempt": self._events.attempt}
        append_record(self._logs / EVALUATIONS, where | of_prompts)
        for line in lines.values():
            append_record(self._logs / ANSWERS, as_json(where | line))

    def rollouts(
        self,
        step: int,
        entries: Sequence[LedgerEntry],
        texts: Sequence[Mapping[str, Any] | None],
        advantages: NDArray[Any],
        token_logprobs: Mapping[int, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Log the first groups of a step as text, with advantages and, if available, logprobs.

        `texts` has one item for each of these groups: None if the text was lost. `token_logprobs`:
        group id -> logprobs of each response.
        """
        groups, attempt = list[dict[str, Any]](), self._events.attempt
        for entry, text, row in zip(entries, texts, advantages, strict=False):
            if text is None:
                continue
            group = {"attempt": attempt, "group_id": entry.group_id, **text, "advantages": row}
            if found := token_logprobs.get(entry.group_id):
                both = zip(text["responses"], found, strict=True)
                group["responses"] = [{**response, **logprobs} for response, logprobs in both]
            groups.append(as_json(group))
            append_record(self._logs / "rollouts.jsonl", {"step": step, **groups[-1]})
        is_due = bool(groups) and step % self._cfg.log_every_n_steps == 0
        if is_due and isinstance(self._metric_logger, WandBLogger):
            with _named(step):
                log_rollout_table(step, groups)

    def checkpoint(self, step: int, folder: str) -> None:
        """Show that a checkpoint was saved."""
        self._checkpoint = folder
        self.note(f"step {step}: saved {folder}")

    def summary(self, replay: str = "", skipped_steps: str = "") -> None:
        """Show the run's closing summary: key figures, final states of groups, paths of files."""
        from grpo_tools.report.facts import key_figures  # tools, loaded at the end of a run only
        from grpo_tools.report.run_files import read_run

        run = read_run(self._output_dir)
        rows = key_figures(run)
        if self._steps:
            rows |= {"books": self._books(), "steps skipped": skipped_steps, "replay": replay}
            rows["checkpoint"] = self._checkpoint or "none"
            rows["sample rollouts"] = str(self._logs / "rollouts.jsonl")
        else:
            ends = (run.metrics[-1][f"eval/success_rate_{end}"] for end in ("low", "high"))
            rows["95 % confidence"] = " to ".join(f"{end:.3f}" for end in ends)
        rows["metrics"] = str(self._logs / "metrics.jsonl")
        self._progress.summary([(label, value) for label, value in rows.items() if value])

    def _books(self) -> str:
        """Return a table of the final states of all groups and tokens; empty without receipts."""
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

    def close(self) -> None:
        """End the display, close the logger, and write the report.

        An error that is ending the run is first written to `logs/failures.jsonl`, for the report.
        After an error, the user is also shown how to resume from the last checkpoint.
        """
        if (error := sys.exception()) is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._write_failure(error)
        self.phase("report")
        self._progress.close()
        self._live_report.stop()
        self._metric_logger.close()  # it may have to wait for a server
        if self._steps or self._evaluated or self._events.attempt:
            self._report()
        self._end_phase()
        if error is not None and self._steps and (books := self._books()):
            self._progress.summary([("books", books)])
        if error is not None and self._cfg.trains and self._steps_left:
            checkpoint = latest(self._output_dir / "checkpoints")
            none = "none, the run ended before the first one was saved"
            self.note(f"last checkpoint: {checkpoint or none}")
            if checkpoint:
                self.note(f"to go on from it: {_resume_command(self._cfg)}")

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
        append_record(self._logs / FAILURES, {"attempt": self._events.attempt, "error": text})


class LiveReport:
    """Rewrites a run's `report.html` at intervals, in a child process; the page reloads itself.

    The child ends when its standard input is closed, so also when this process dies. Its errors go
    to `logs/report.log`, and do not disturb the run.
    """

    def __init__(self, output_dir: Path, note: Callable[[str], None]) -> None:
        self._output_dir, self._note = output_dir, note
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child process that writes the page, unless it was started before."""
        if self._child is not None:
            return
        command = [sys.executable, "-m", "grpo_tools.report.live", str(self._output_dir)]
        with (self._output_dir / "logs" / "report.log").open("ab") as log:
            self._child = subprocess.Popen(  # Ctrl-C reaches the driver, which stops it
                command, stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """Stop the child process once it has written its page; kill it after a minute."""
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


@contextlib.contextmanager
def _named(step: int) -> Iterator[None]:
    """Context manager that adds `metric_logger` and the step to the message of an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(f"metric_logger cannot log step {step}: {error}") from error


def _resume_command(cfg: Settings) -> str:
    """Return the command of this process as it was typed, with the overrides that resume a run."""
    _, program, *words = sys.orig_argv
    replay = ("replay_events", "replay_until")  # the config may give them, too
    set_anew = ("resume_from_checkpoint", *replay)
    kept = [word for word in words if not word.lstrip("~").startswith(set_anew)]
    kept += [f"{key}=null" for key in replay if getattr(cfg, key) is not None]
    typed = ["tune"] if Path(program).name == "tune" else ["python", program]
    return shlex.join([*typed, *kept, "resume_from_checkpoint=true"])


def _throughput(seconds: float, generated: float, trained: float) -> dict[str, float]:
    return {
        "throughput/generated_tokens_per_second": generated / seconds,
        "throughput/trained_tokens_per_second": trained / seconds,
    }

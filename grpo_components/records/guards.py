"""Ends a run that cannot be trusted, and warns of mistakes that raise no error."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from grpo_components.errors import DisagreementError, FailedSamplesError, SkippedStepsError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.files import append_record
from grpo_components.settings import Settings
from grpo_components.trajectory import GroupSummary

_FEW_TOKENS = 16
"""If a step has fewer fresh tokens (see `check_agreement`), rounding weighs more: the KL bound is
multiplied by `_FEW_TOKENS` / tokens."""
_MAX_ERROR_CHARS = 300
"""Maximum characters of an error's first line in a message; `failed_samples.jsonl` has it all."""
_SEEDS_KEPT = 100_000
"""Number of sampling seeds kept, to find seeds that are used twice."""
_ROUNDING = 1e-5
"""Allowed difference of a loss from the sum of its parts, as a multiple of the largest of these: 1,
|loss|, |sum| and `ratio/max`."""
_SOME_END = 0.1
"""If more than this share of a step's responses ended by themselves, a later step whose responses
are all cut off may mean that the policy has collapsed."""
_MIN_STEPS, _LARGE_KL, _JUMP = 3, 0.1, 20.0
"""When `mismatch/generator_kl` counts as a jump: after at least this many steps, above this many
nats, and above this many times the median of the steps before."""


def check_agreement(max_generator_kl: float | None, step: int, metrics: Mapping[str, Any]) -> None:
    """End the run if trainer and generator disagree on the logprobs of a step's fresh tokens.

    Fresh tokens were sampled by the version being trained, so both sides have the same weights. A
    step without fresh tokens always passes.
    """
    tokens = metrics.get("mismatch/fresh_tokens", 0)
    if max_generator_kl is None or not tokens > 0:
        return
    kl, bound = metrics["mismatch/fresh_kl"], max_generator_kl * max(1.0, _FEW_TOKENS / tokens)
    if kl > bound:
        few = f", raised to {bound:.3g} for few tokens" if bound > max_generator_kl else ""
        raise DisagreementError(
            f"step {step}: trainer and generator disagree on tokens sampled with the trainer's "
            f"own weights: mismatch/fresh_kl is {kl:.3g} over {tokens:.0f} tokens; "
            f"max_generator_kl is {max_generator_kl:g}{few}. Likely causes: `model` does not match "
            "config.json in base_model_path; a module or sampler setting that only one side "
            "has; incomplete weights in the generator"
        )


class FailedSamples:
    """Counts and records the failed samples of training and evaluation; ends a run with too many.

    The run ends if, since the last training step, failed samples reach the share
    `max_failed_samples` of all samples, or of one step's samples if these are more. It also ends if
    every sample of an evaluation failed. Every failed sample is written to `failed_samples.jsonl`;
    the first after each step is also shown.
    """

    def __init__(self, cfg: Settings, events: EventOrder, note: Callable[[str], None]) -> None:
        self._max_failed_samples = cfg.max_failed_samples
        self._step_samples = cfg.groups_per_step * cfg.group_size
        self._path = Path(cfg.output_dir) / "logs" / "failed_samples.jsonl"
        self._events, self._note = events, note
        self._count = self._ended = 0

    def count_group(self, entry: LedgerEntry, group: GroupSummary) -> bool:
        """Count a group's failed samples; return whether every sample of the group failed."""
        what = {"group_id": entry.group_id, "epoch": entry.epoch}
        self._ended += len(group.rewards)
        self._record(entry.prompt, group.errors, f"group {entry.group_id}", what)
        return len(group.errors) == len(group.rewards)

    def count_evaluation(
        self, step: int, results: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Count the failed samples of an evaluation; return the results of all other samples."""
        self._ended += len(results)
        for result in results:
            errors = [] if result["error"] is None else [result["error"]]
            self._record(result, errors, f"the evaluation at step {step}", {"evaluation": step})
        scored = [result for result in results if result["error"] is None]
        if not scored:
            error = _first_line(results[0]["error"])[:_MAX_ERROR_CHARS]
            raise FailedSamplesError(
                f"every sample of the evaluation at step {step} failed; the first error: {error}; "
                f"all errors: {self._path}"
            )
        return scored

    def take_count(self) -> int:
        """Return how many samples failed since the last call; call it once per training step."""
        count, self._count, self._ended = self._count, 0, 0
        return count

    def _record(
        self, prompt: Mapping[str, Any], errors: Sequence[str], where: str, what: dict[str, Any]
    ) -> None:
        if not errors:
            return
        record = {
            "attempt": self._events.attempt,
            **what,
            "prompt_index": prompt["prompt_index"],
            "prompt": prompt["prompt_text"],
            "errors": dict(Counter(map(_first_line, errors))),  # -> samples
        }
        tracebacks = {_first_line(error): error.partition("\n")[2] for error in reversed(errors)}
        if any(tracebacks.values()):
            record["tracebacks"] = {line: text for line, text in tracebacks.items() if text}
        append_record(self._path, record)
        shown = _first_line(errors[-1])[:_MAX_ERROR_CHARS]
        if self._count == 0:
            self._note(f"samples failed in {where}: {shown} (all errors: {self._path})")
        self._count += len(errors)
        if self._count >= self._max_failed_samples * max(self._ended, self._step_samples):
            raise FailedSamplesError(
                f"max_failed_samples: {self._max_failed_samples:g} given, but {self._count} of "
                f"{self._ended} samples failed since the last training step (a step trains "
                f"{self._step_samples}); the last error, for prompt "
                f"{prompt['prompt_index']}: {shown}; all errors: {self._path}"
            )


class RunWatch:
    """Warns of mistakes that raise no error, once for each kind of mistake.

    The kinds: a loss that is not the sum of its parts, a seed used twice, all responses cut off, a
    jump of the generator KL. Warnings also go to `warnings.jsonl`, for `grpo diagnose`. A resume
    deletes this file, because the user may have fixed the mistakes.
    """

    def __init__(
        self, note: Callable[[str], None], logs: Path, *, averages_tokens: bool, ends: str
    ) -> None:
        self._note, self._averages_tokens, self._ends = note, averages_tokens, ends
        self._path = logs / "warnings.jsonl"
        self._path.unlink(missing_ok=True)
        self._shown: set[str] = set()
        self._seeds: dict[int, int] = {}  # seed -> group that it sampled for
        self._mismatch: deque[float] = deque(maxlen=50)
        self._most_ended = 0.0  # largest share of a step's responses that were not cut off

    def count_group(self, group: GroupSummary) -> None:
        """Warn if a seed of a generated group was used before, in this group or another."""
        for seed in group.seeds:
            other = self._seeds.setdefault(seed, group.group_id)
            if other != group.group_id or group.seeds.count(seed) > 1:
                self._once(
                    "seeds",
                    f"warning: groups {other} and {group.group_id} have samples of the same seed "
                    f"({seed}): their random numbers are the same",
                )
        while len(self._seeds) > _SEEDS_KEPT:
            del self._seeds[next(iter(self._seeds))]

    def check_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warn if the loss is not its parts' sum, all responses are cut off, or the KL jumps."""
        self._check_balance(step, metrics)
        cut_off = metrics.get("rollout/cut_off_fraction", math.nan)
        self._most_ended = max(self._most_ended, 1 - cut_off)
        if cut_off == 1.0:
            line = f"step {step}: all responses were cut off at generator.max_response_tokens; "
            if self._most_ended > _SOME_END:
                line = f"since {line}before, up to {self._most_ended:.0%} of a step's ended by "
                line += "themselves: the policy may have collapsed; see grad_norm and optimizer.lr"
            else:  # no warning: an untrained policy may just be long
                line += f"only {self._ends} would have ended one: does the model end its responses "
                line += "otherwise?"
            self._once("cut off", line)
        kl = metrics.get("mismatch/generator_kl", math.nan)
        if not math.isfinite(kl):
            return
        usual = median(self._mismatch) if len(self._mismatch) >= _MIN_STEPS else math.inf
        if kl > max(_LARGE_KL, _JUMP * usual):
            self._once(
                "mismatch",
                f"warning: step {step}: mismatch/generator_kl is {kl:.3g}, the median of the "
                f"{len(self._mismatch)} steps before is {usual:.3g}: some tokens are not those "
                "that were sampled, or the policy has jumped",
            )
        self._mismatch.append(kl)

    def _check_balance(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warn if a token-mean loss is not its parts' sum, unless a part is unknown or `ptx`."""
        names = ("loss/total", "loss/policy", "loss/penalty", "loss/ptx", "ratio/max")
        total, known, penalty, other, ratio = (float(metrics.get(n, math.nan)) for n in names)
        known += 0.0 if math.isnan(penalty) else penalty
        if not self._averages_tokens or not math.isnan(other) or not math.isfinite(total - known):
            return
        if abs(total - known) > _ROUNDING * max(1.0, abs(total), abs(known), ratio):
            self._once(
                "loss",
                f"warning: step {step}: loss/total is {total:.5g}, but the mean of its parts over "
                f"the tokens is {known:.5g}: tokens do not weigh the same, as where each rank or "
                "micro-batch divides by its own number of tokens",
            )

    def _once(self, kind: str, line: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            self._note(line)
            append_record(self._path, {"kind": kind, "warning": line})


def _first_line(error: str) -> str:
    """Return the first line of an error: the lines after it are its traceback."""
    return error.partition("\n")[0]


class SkippedSteps:
    """Reports skipped training steps (without an update); ends the run after too many in a row."""

    def __init__(self, max_skipped_steps: int, note: Callable[[str], None]) -> None:
        self._max_skipped_steps, self._note = max_skipped_steps, note
        self._in_a_row = 0
        self._skipped: list[int] = []

    def record(self, step: int, why: str) -> None:
        """Count a step: as skipped if `why` is not empty; raise after too many skips in a row."""
        if not why:
            self._in_a_row = 0
            return
        self._skipped.append(step)
        self._in_a_row += 1
        self._note(f"step {step} is skipped: {why}")
        if self._in_a_row >= self._max_skipped_steps:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._max_skipped_steps} given, and the {self._in_a_row} "
                f"steps {step - self._in_a_row + 1} to {step} in a row were skipped, the last "
                f"because {why}"
            )

    def summary(self) -> str:
        """Return how many steps were skipped, and the first of them; empty if none was."""
        skipped = self._skipped
        return f"{len(skipped)}, the first was step {skipped[0]}" if skipped else ""

"""Tries each reward of a config on some rows, in a separate process, before a run starts."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_components.data.columns import CALL, other_columns
from grpo_components.errors import ConfigError, shown
from grpo_components.rewards.pool import RewardInput, RewardSpec, Score, Worker

_ALLOWED = "a class whose objects take prompt_text, response_text, answer and finish_reason by name"
_SCORES = "one that can score a row of the data set"
"""Used in place of `_ALLOWED` if a reward of this package raises: its signature cannot be wrong."""
_ANSWERS = "a data set whose answers it accepts, or another answer_format"
_NOISE = "nonsense " * 9999
_CHECK_S = 20.0
"""Seconds after which `check_rows` stops, for all data sets together."""


class RewardTrial:
    """Tries rewards in a separate process, which they may hang or kill."""

    def __init__(
        self, rewards: dict[str, RewardSpec], samples: list[RewardInput], timeout_s: float
    ) -> None:
        self._rewards, self._samples, self._timeout_s = rewards, samples, timeout_s
        self._worker = Worker(self._rewards, 0, subprocess.DEVNULL)  # starts to build the rewards

    def finish(self) -> tuple[list[str], list[str]]:
        """Let each reward score known answers and an empty response; return scores and warnings.

        For a reward with a `perfect_response`, the scores of its perfect responses are returned
        instead of those of known answers.
        """
        of, problem = self._worker.wait_until_built()
        if problem:
            raise self._error(of, f"cannot be built, {problem}", _ALLOWED)
        lines: list[str] = []
        doubts: list[str] = []
        for name, spec in self._rewards.items():
            known = [self._score(name, sample) for sample in self._samples]
            if all(score.error for score in known):  # failing for some samples is allowed
                problem = _problem(name, known[0].error or "")
                allowed = _SCORES if spec.component.startswith("grpo_components.") else _ALLOWED
                if allowed == _ALLOWED and not problem.startswith("raised TypeError"):
                    answer = shown(self._samples[0]["response_text"])
                    allowed = f"one that scores a known answer, such as {answer}, as the response"
                elif allowed == _ALLOWED and " missing " in problem:
                    columns = ", ".join(other_columns(self._samples[0])) or "none"
                    allowed = f"{', '.join(CALL)}, or a column of the rows, which have: {columns}"
                raise self._error(name, problem, allowed)
            rows = f"the known answers of {len(known)} rows"
            if self._worker.has_perfect[name]:
                known = [self._score(name, sample, perfect=True) for sample in self._samples]
                rows = f"its own best responses to {len(known)} rows"
            empty, noise = ({**self._samples[0], "response_text": text} for text in ("", _NOISE))
            of_empty = self._score(name, empty)
            scored = (*known, of_empty)
            *given, last = ("fails" if each.error else f"{each.reward:g}" for each in scored)
            scores = f"{', '.join(given)} for {rows}; {last} for an empty response"
            lines.append(f"rewards.{name}: {scores}")
            above, doubt = [each.reward for each in scored if each.is_above], ""
            if of_empty.error:
                raised = _problem(name, of_empty.error).partition("\n")[0]
                doubt = f"an empty response fails its sample: the reward {raised}"
            elif spec.is_success and above:
                doubt = f"gives {max(above):g}, above its `max_reward` (1 if none is set): "
                doubt += "each response that gets that much counts as a success"
            elif {*given} == {last} and of_empty.reward == self._score(name, noise).reward != 0:
                doubt = f"gives {last} to {rows}, to an empty response and to a senseless one"
            doubts += [f"warning: rewards.{name}: {doubt}"] if doubt else []
        return lines, doubts

    def _score(self, name: str, sample: RewardInput, *, perfect: bool = False) -> Score:
        try:
            return self._ask(name, sample, self._timeout_s, "a row" if perfect else "")
        except TimeoutError:
            hang = f"hangs: no answer within {self._timeout_s:g} s, timeouts.reward_s"
            raise self._error(name, hang, "one that answers in time") from None

    def _ask(self, name: str, sample: RewardInput, timeout_s: float, row: str = "") -> Score:
        """Let a reward score a sample; with a `row` (named in errors), its `perfect_response`."""
        try:
            return self._worker.ask(name, sample, timeout_s, bool(row))
        except (EOFError, ConnectionError):
            doing = f"on a perfect response to {row}" if row else "while it was called"
            raise self._error(name, f"ended its process {doing}", _ALLOWED) from None

    def check_rows(
        self, data: Mapping[str, Any], sample_of: Callable[[Any], RewardInput]
    ) -> list[str]:
        """Find rows whose `perfect_response` is no success for the reward that gave it.

        Call `finish` first. Checks rows of `data` (config key -> data set) for at most `_CHECK_S`.
        Returns warnings about rows with this problem and about unchecked rows. Raises a ConfigError
        if all checked rows of a data set have the problem.
        """
        rows = [(key, row) for key, dataset in data.items() for row in range(len(dataset))]
        random.Random(0).shuffle(rows)  # so that all data sets share the time
        names = [name for name, has_one in self._worker.has_perfect.items() if has_one]
        found = {(name, key): dict[int, str]() for name in names for key in data}
        deadline = time.monotonic() + _CHECK_S
        with contextlib.suppress(TimeoutError):
            for key, row in rows if names else ():
                prompt = data[key][row]
                number, sample = prompt["prompt_index"] + 1, sample_of(prompt)
                for name in names:
                    left_s = deadline - time.monotonic()
                    score = self._ask(name, sample, left_s, f"row {number} of {key}")
                    problem = "" if score.success else f"gave {score.reward:g}"
                    if score.error:
                        problem = _problem(name, score.error).partition("\n")[0]
                    text = f"{number}: {shown(prompt['answer'])} ({problem})"
                    found[name, key][number] = text if problem else ""
        lines: list[str] = []
        for (name, key), rows in found.items():
            refused = [number for number, problem in rows.items() if problem]
            text = f"{len(refused):,} of {len(rows):,} rows of {key}"
            if len(rows) < len(data[key]):
                text += f" (of {len(data[key]):,}, checked for {_CHECK_S:g} s)"
            text += ": their own answer scores 0 or fails"
            if refused:
                text += f"; the first is row {rows[min(refused)]}"
            if refused and len(refused) == len(rows):
                raise ConfigError(f"rewards.{name}", text, _ANSWERS)
            if refused or len(rows) < len(data[key]):
                lines.append(f"warning: rewards.{name}: {text}")
        return lines

    def close(self) -> None:
        """Kill the process and its process group."""
        self._worker.kill()

    def _error(self, name: str, problem: str, allowed: str) -> ConfigError:
        line, _, trace = problem.partition("\n")
        what, _, own = line.partition("; allowed: ")  # a reward of this package says what it allows
        what = f"{self._rewards[name].component} {what}"
        return ConfigError(f"rewards.{name}", what, own or allowed, trace)


def _problem(name: str, error: str) -> str:
    """Rephrase a score's error so that it can follow the reward's name in a sentence."""
    text = error.removeprefix(f"reward {name}: ")
    return text if text.startswith("gave ") else f"raised {text}"

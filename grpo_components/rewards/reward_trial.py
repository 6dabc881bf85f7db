"""Builds and calls each reward of a config once, in a separate process, before a run starts."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from grpo_components.errors import MAX_MESSAGE, ConfigError, shown
from grpo_components.objective.component_errors import (
    MAX_ERROR_CHARS,
    defined_at,
    describe,
    user_traceback,
)
from grpo_components.rewards.pool import RewardInput, RewardSpec, end_process, start_process
from grpo_components.rewards.scoring import arguments_for, build, value_of

_START_TIMEOUT_S, _START_DEADLINES = 45.0, 4
"""Time to import and build one reward: in seconds, or in deadlines of a call if that is more."""
_OURS = "grpo_components."
_ALLOWED = "a class whose objects take prompt_text, response_text, answer and finish_reason by name"
_IN_TIME = "one that answers in time"
_SCORES = "one that can score a row of the data set"
"""What is wrong with a reward of ours that raises: not its form."""
_ANSWERS = "a data set whose answers it accepts, or another answer_format"
_CHECK_S = 20.0
"""Seconds for the rewards to score their perfect responses to the rows of all data sets."""


class RewardTrial:
    """Tries rewards in the background, in a separate process that they may hang or kill."""

    def __init__(
        self, rewards: dict[str, RewardSpec], samples: list[RewardInput], timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._start_s = max(_START_TIMEOUT_S, _START_DEADLINES * timeout_s)
        given = rewards, samples
        self._process, self._connection = start_process("reward_trial", given, subprocess.DEVNULL)
        self._with_perfect: list[str] = []
        """Names of the rewards that have a `perfect_response`."""

    def finish(self) -> None:
        """Wait until each reward has returned a finite number."""
        name, doing, limit_s = next(iter(self._rewards), ""), "built", self._start_s
        while True:
            try:
                if not self._connection.poll(limit_s):
                    key = "timeouts.reward_s" if doing == "called" else "to import and build it"
                    what = "no answer" if doing == "called" else "not built"
                    hang = f"hangs: {what} within {limit_s:g} s, {key}"
                    raise self._error(name, hang, _IN_TIME)
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                problem = f"ended its process while it was {doing}"
                raise self._error(name, problem, _ALLOWED) from None
            if isinstance(message, list):
                self._with_perfect = message
                return
            name, doing, problem, traceback = message
            if problem:
                is_ours = self._rewards[name].component.startswith(_OURS)
                raise self._error(name, problem, _SCORES if is_ours else _ALLOWED, traceback)
            limit_s = self._timeout_s if doing == "called" else self._start_s

    def check_rows(
        self, data: Mapping[str, Any], sample_of: Callable[[Any], RewardInput]
    ) -> list[str]:
        """Let each reward score its perfect response to every row; return a line if some are wrong.

        Comes after `finish`; `data` has the data sets by their key. All rows wrong is an error.
        """
        rows = [(key, row) for key, dataset in data.items() for row in range(len(dataset))]
        random.Random(0).shuffle(rows)  # so that the time goes to rows from everywhere
        found = {(name, key): dict[int, str]() for name in self._with_perfect for key in data}
        deadline = time.monotonic() + _CHECK_S
        for key, row in rows if self._with_perfect else ():
            prompt = data[key][row]
            number, sample = prompt["prompt_index"] + 1, sample_of(prompt)
            for name in self._with_perfect:
                try:
                    self._connection.send((name, sample))
                    if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                        return self._refused(found, data)
                    problem = self._connection.recv()
                except (EOFError, ConnectionError):
                    problem = f"ended its process on a perfect response to row {number} of {key}"
                    raise self._error(name, problem, _ALLOWED) from None
                text = f"{number}: {shown(prompt['answer'])} ({problem})"
                found[name, key][number] = text if problem else ""
        return self._refused(found, data)

    def _refused(
        self, found: Mapping[tuple[str, str], Mapping[int, str]], data: Mapping[str, Any]
    ) -> list[str]:
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
        end_process(self._process)
        self._connection.close()

    def _error(
        self, name: str, problem: str, allowed: str, user_traceback: str = ""
    ) -> ConfigError:
        what, _, own = problem.partition("; allowed: ")  # a reward of ours says what it allows
        what = f"{self._rewards[name].component} {what}"
        return ConfigError(f"rewards.{name}", what, own or allowed, user_traceback)


def _problem_of(reward: Any, sample: RewardInput) -> tuple[str, str]:
    """Return what is wrong with one call of a reward, and its traceback; both may be empty."""
    if not callable(reward):
        return f"makes a {type(reward).__name__}, which cannot be called", ""
    is_ours = type(reward).__module__.startswith(_OURS)
    where = "" if is_ours else defined_at(reward)  # a line of ours tells the user nothing
    try:
        number = value_of(reward, sample)
    except (Exception, SystemExit) as error:  # user code may raise anything
        max_chars = MAX_MESSAGE if is_ours else MAX_ERROR_CHARS
        return f"raised {describe(error, max_chars, where)}", user_traceback(error)
    return ("" if math.isfinite(number) else f"gave {number}{where}"), ""


def _refusal(reward: Any, sample: RewardInput) -> str:
    """Return why a reward does not accept its perfect response to a row; empty if it does."""
    try:
        response = reward.perfect_response(**arguments_for(reward.perfect_response, sample, ()))
        if response is None:
            return ""
        value = value_of(reward, {**sample, "response_text": response})
    except (Exception, SystemExit) as error:  # user code may raise anything
        return f"raised {describe(error)}"
    return "" if value >= getattr(reward, "max_reward", 1.0) else f"gave {value:g}"


def _serve(connection: Connection) -> None:
    rewards, samples = connection.recv()
    built: dict[str, Any] = {}
    for name, spec in rewards.items():
        connection.send((name, "built", "", ""))
        try:
            reward = built[name] = build(spec)
        except (Exception, SystemExit) as error:  # user code may raise anything
            problem = f"cannot be built, {describe(error)}"
            connection.send((name, "built", problem, user_traceback(error)))
            return
        problems = []
        for sample in samples:
            connection.send((name, "called", "", ""))
            problems.append(_problem_of(reward, sample))
            if not problems[-1][0]:  # failing for some samples is allowed
                break
        else:
            connection.send((name, "called", *problems[0]))
            return
    connection.send([name for name, each in built.items() if hasattr(each, "perfect_response")])
    with contextlib.suppress(EOFError):
        while True:
            name, sample = connection.recv()
            connection.send(_refusal(built[name], sample))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

"""Builds and calls each reward of a config once, in a separate process, before a run starts."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

from grpo_components.objective.component_errors import ComponentError, describe
from grpo_components.rewards.pool import RewardInput, RewardSpec

_START_TIMEOUT_S = 120.0
"""Seconds to import and build one reward."""
_ALLOWED = "a class whose objects take prompt_text, response_text, answer and finish_reason by name"


class RewardTrial:
    """Tries rewards in the background, in a separate process that they may hang or kill.

    Args:
        rewards: spec of each reward, by name.
        samples: keyword arguments to call the rewards with, in turn; a reward passes as soon as it
            returns a finite number.
        timeout_s: deadline of one call in seconds.
    """

    def __init__(
        self, rewards: dict[str, RewardSpec], samples: list[RewardInput], timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo_components.rewards.reward_trial", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # own process group: `close` also ends what rewards start
        )
        theirs.close()
        self._connection.send((rewards, samples))

    def finish(self) -> None:
        """Wait until each reward has returned a finite number.

        Raises:
            ComponentError: a reward cannot be built, failed for all samples, or missed a deadline.
        """
        name, doing, limit_s = next(iter(self._rewards), ""), "built", _START_TIMEOUT_S
        while True:
            try:
                if not self._connection.poll(limit_s):
                    problem = f"was not {doing} within {limit_s:g} s"
                    raise self._error(name, problem, "one that answers in time")
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                problem = f"ended its process while it was {doing}"
                raise self._error(name, problem, _ALLOWED) from None
            if message is None:
                return
            name, doing, problem = message
            if problem:
                raise self._error(name, problem, _ALLOWED)
            limit_s = self._timeout_s if doing == "called" else _START_TIMEOUT_S

    def close(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:  # once reaped, another process may have its pid
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _error(self, name: str, problem: str, allowed: str) -> ComponentError:
        where = f"rewards.{name}: {self._rewards[name].component}"
        return ComponentError(f"{where} {problem}; allowed: {allowed}")


def _problem_of(reward: Any, sample: RewardInput) -> str:
    if not callable(reward):
        return f"makes a {type(reward).__name__}, which cannot be called"
    try:
        value: Any = reward(**sample)
        number = float(value)
        _ = number >= getattr(reward, "max_reward", 1.0)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return f"raised {describe(error)}"
    return "" if math.isfinite(number) else f"gave {number}"


def _serve(connection: Connection) -> None:
    rewards, samples = connection.recv()
    for name, spec in rewards.items():
        connection.send((name, "built", ""))
        try:
            module, _, attribute = spec.component.rpartition(".")
            reward = getattr(importlib.import_module(module), attribute)(**spec.kwargs)
        except (Exception, SystemExit) as error:  # user code may raise anything
            connection.send((name, "built", f"cannot be built, {describe(error)}"))
            return
        problems = []
        for sample in samples:
            connection.send((name, "called", ""))
            problems.append(_problem_of(reward, sample))
            if not problems[-1]:  # failing for some samples is allowed
                break
        else:
            connection.send((name, "called", problems[0]))
            return
    connection.send(None)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

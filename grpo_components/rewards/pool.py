"""Runs rewards in worker processes, with a deadline per sample, so that none blocks the others."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from typing import Any

_START_TIMEOUT_S = 120.0
"""Seconds for a process to import and build a reward."""
_EXIT_TIMEOUT_S = 10.0
"""Seconds for a process to exit after it closed its connection."""

RewardInput = dict[str, Any]
"""Keyword arguments of a reward: prompt_text, response_text, answer, finish_reason, and the other
columns of the row; a reward gets those columns that its signature takes."""


class RewardPoolError(RuntimeError):
    """The rewards cannot be built or their processes cannot start; no sample is to blame."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward of the config."""

    component: str
    """Dotted path of the reward's class or factory."""
    kwargs: dict[str, Any]
    weight: float
    is_success: bool
    """Whether this reward decides success: a sample succeeds if this reward is at its maximum."""


@dataclass(frozen=True)
class Score:
    """Result of all rewards for one sample."""

    reward: float
    """Weighted sum of the terms; NaN if a reward failed."""
    terms: dict[str, float]
    """Unweighted value of each reward, by name."""
    success: bool
    error: str | None
    """Name of the reward that failed, with file, line and message of its error; further lines are
    the traceback of its code. None if all succeeded."""
    used: dict[str, float] = field(default_factory=dict, compare=False)
    """What the rewards used for this sample, by reward and kind: `judge_requests`, `judge_cost`."""


def reward_specs(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardSpec]:
    """Read the `rewards` section of a config."""
    own = ("_component_", "weight", "is_success")
    specs: dict[str, RewardSpec] = {}
    for name, node in nodes.items():
        kwargs = {key: value for key, value in node.items() if key not in own}
        specs[name] = RewardSpec(node["_component_"], kwargs, node["weight"], node["is_success"])
    return specs


class RewardPool:
    """Scores the samples of many threads in a few worker processes (rules in docs/rewards.md)."""

    def __init__(
        self, rewards: dict[str, RewardSpec], *, num_workers: int, timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._log = logging.getLogger(__name__)
        self._late: Counter[str] = Counter()
        """Missed deadlines by the name of the reward."""
        self._thread = threading.local()
        self._workers: set[Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        for _ in range(num_workers):  # start the processes now, but do not wait for them
            self._threads.submit(self._get_worker)

    def begin(self, sample: RewardInput) -> Future[Score]:
        """Start to score a sample, without waiting. Any thread may call this."""
        return self._threads.submit(self._score_one, sample)

    def score(self, samples: Sequence[RewardInput]) -> list[Score]:
        """Score samples and wait for all scores. Any thread may call this."""
        scores = [self.begin(each) for each in samples]
        try:
            return [score.result() for score in scores]
        finally:
            for score in scores:  # left over if one of them raised
                score.cancel()

    __call__ = score

    def late(self) -> str:
        """Return which rewards missed their deadlines, for an error of what waited for them."""
        if not self._late:
            return "none missed its deadline, but more samples wait than reward_workers can score"
        limit = f"missed the deadline of {self._timeout_s:g} s (timeouts.reward_s) for"
        return ", ".join(f"{name} {limit} {count} samples" for name, count in self._late.items())

    def close(self) -> None:
        """Kill all reward processes, even those that are scoring a sample."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.copy():
            worker.kill()
        self._threads.shutdown()

    def _get_worker(self) -> Worker:
        # One process per thread: a process dies with the thread that started it (PDEATHSIG).
        worker = getattr(self._thread, "worker", None)
        if worker is None:
            with self._lock:  # so that no process starts while `close` kills the processes
                if self._closed:
                    raise RewardPoolError("rewards: the pool is closed")
                try:
                    worker = self._thread.worker = Worker(self._rewards, self._timeout_s / 2)
                except OSError as error:
                    raise RewardPoolError(f"rewards: cannot start a process: {error}") from error
                self._workers.add(worker)
        return worker

    def _score_one(self, sample: RewardInput) -> Score:
        too_costly: list[str] = []
        while True:
            worker = self._get_worker()
            try:
                return worker.score((sample, too_costly), self._timeout_s)
            except TimeoutError:
                self._late[worker.running] += 1
                self._drop(worker)
                return _failed(worker, f"TimeoutError: no score after {self._timeout_s:g} s")
            except (EOFError, ConnectionError):
                is_costly = worker.exceeded_cpu_limit()
            except RewardPoolError:
                if not self._closed:  # else killed by `close` during its start
                    self._drop(worker)
                    raise
                is_costly = False
            self._drop(worker)
            if not is_costly:
                return _failed(worker, "its process died")
            too_costly.append(worker.running)
            end = sample["response_text"][-80:]
            self._log.warning("reward %s: 0, the response costs too much: %r", worker.running, end)

    def _drop(self, worker: Worker) -> None:
        self._thread.worker = None
        self._workers.discard(worker)
        worker.kill()


def _failed(worker: Worker, why: str) -> Score:
    return Score(math.nan, {}, False, f"reward {worker.running}: {why}")


class Worker:
    """Controls one reward process, from one thread of the process that owns it.

    `max_cpu_s` is the largest CPU limit of one reward; 0: there is none.
    """

    def __init__(
        self, rewards: dict[str, RewardSpec], max_cpu_s: float, output: int | None = None
    ) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo_components.rewards.scoring", str(theirs.fileno())],
            # Pass on sys.path, because a Ray worker extends it without setting PYTHONPATH.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # own process group: `kill` also ends what rewards start
        )
        theirs.close()
        self._connection.send((rewards, max_cpu_s))
        self.with_perfect: list[str] | None = None
        """Names of the rewards that have a `perfect_response`, once all are built."""
        self.running = next(iter(rewards), "")
        """Name of the reward that is built or called, or was last."""

    def wait_until_built(self, timeout_s: float) -> str:
        """Wait until all rewards are built, each within `timeout_s`; return what is wrong, if any.

        That is one line, then the traceback of the user's code.
        """
        problem = ""
        while self.with_perfect is None and not problem:
            if not self._connection.poll(timeout_s):
                return f"it did not answer within {timeout_s:g} s"
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                return "its process ended"
            if isinstance(message, list):
                self.with_perfect = message
            else:
                self.running, problem = message
        return problem

    def score(self, call: tuple[Any, ...], timeout_s: float) -> Score:
        """Score one sample; `call` is the sample and what follows it in `score_sample`."""
        if problem := self.wait_until_built(_START_TIMEOUT_S).partition("\n")[0]:
            raise RewardPoolError(f"rewards cannot be built: reward {self.running}: {problem}")
        self._connection.send(call)
        deadline = time.monotonic() + timeout_s
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            message = self._connection.recv()
            if isinstance(message, Score):
                return message
            self.running = message
        raise TimeoutError

    def exceeded_cpu_limit(self) -> bool:
        """Whether the kernel killed the process because a sample took too much CPU time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_TIMEOUT_S) == -signal.SIGPROF
        return False

    def kill(self) -> None:
        """Kill the process and its process group. Any thread may call this."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:  # once reaped, another process may have its pid
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

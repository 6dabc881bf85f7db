"""Runs rewards in worker processes, with a deadline per sample, so that none blocks the others."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

_START_TIMEOUT_S = 120.0
"""Seconds for a process to import and build all rewards."""
_EXIT_TIMEOUT_S = 10.0
"""Seconds for a process to exit after it closed its connection."""
_PR_SET_PDEATHSIG = 1

MAX_ERROR_CHARS = 1000
"""An error message is cut to this many characters, because it may quote the whole response."""

_LOGGED_CHARS = 80
"""Number of characters from the end of a response that a log message shows."""

RewardInput = dict[str, str]
"""Keyword arguments of a reward: prompt_text, response_text, answer, finish_reason."""


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
    """Name of the reward that failed, and why it failed; None if all succeeded."""


def reward_specs(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardSpec]:
    """Read the `rewards` section of a config.

    Args:
        nodes: for each reward's name, a mapping with `_component_`, `weight`, `is_success` and the
            arguments of the component.

    Returns:
        The rewards by name.
    """
    own = ("_component_", "weight", "is_success")
    return {
        name: RewardSpec(
            component=node["_component_"],
            kwargs={key: value for key, value in node.items() if key not in own},
            weight=node["weight"],
            is_success=node["is_success"],
        )
        for name, node in nodes.items()
    }


class RewardPool:
    """Scores the samples of many threads in a few worker processes.

    A reward class may set `response_cpu_s`, a limit on the CPU seconds per response; half of
    `timeout_s` applies if that is less. If a response exceeds the limit, the kernel kills the
    process, this reward counts as 0, and a new process runs the other rewards. A sample that misses
    the deadline for any other reason has failed.

    Args:
        rewards: spec of each reward, by name.
        num_workers: number of worker processes; each is driven by a thread of this process.
        timeout_s: deadline of one sample in seconds, counted from the start of its scoring.
    """

    def __init__(
        self, rewards: dict[str, RewardSpec], *, num_workers: int, timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._log = logging.getLogger(__name__)
        self._thread = threading.local()
        self._workers: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        for _ in range(num_workers):  # start the processes now, but do not wait for them
            self._threads.submit(self._get_worker)

    def score(self, samples: list[RewardInput]) -> list[Score]:
        """Score samples and wait for all scores. Any thread may call this.

        Args:
            samples: the rewards' keyword arguments for each sample; any number of samples.

        Returns:
            The scores, in the order of the samples.

        Raises:
            RewardPoolError: the rewards cannot be built, their processes cannot start, or the pool
                is closed.
        """
        return list(self._threads.map(self._score_one, samples))

    def close(self) -> None:
        """Kill all reward processes, even those that are scoring a sample."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.copy():
            worker.kill()
        self._threads.shutdown()

    def _get_worker(self) -> _Worker:
        # One process per thread: a process dies with the thread that started it (PDEATHSIG).
        worker = getattr(self._thread, "worker", None)
        if worker is None:
            with self._lock:  # so that no process starts while `close` kills the processes
                if self._closed:
                    raise RewardPoolError("rewards: the pool is closed")
                try:
                    worker = self._thread.worker = _Worker(self._rewards, self._timeout_s / 2)
                except OSError as error:
                    raise RewardPoolError(f"rewards: cannot start a process: {error}") from error
                self._workers.add(worker)
        return worker

    def _score_one(self, sample: RewardInput) -> Score:
        too_costly: list[str] = []
        while True:
            worker = self._get_worker()
            score = self._score_with(worker, sample, too_costly)
            if score is not None:
                return score
            too_costly.append(worker.running)
            end = sample["response_text"][-_LOGGED_CHARS:]
            self._log.warning("reward %s: 0, the response costs too much: %r", worker.running, end)

    def _score_with(
        self, worker: _Worker, sample: RewardInput, too_costly: list[str]
    ) -> Score | None:
        """Score a sample in one process; return None if a reward exceeded its CPU limit."""
        try:
            return worker.score(sample, too_costly, self._timeout_s)
        except TimeoutError:
            problem = f"TimeoutError after {self._timeout_s:g} s"
        except (EOFError, ConnectionError):
            if worker.exceeded_cpu_limit():
                self._drop(worker)
                return None
            problem = "its process died"
        except RewardPoolError:
            if not self._closed:
                self._drop(worker)
                raise
            problem = "its process died"  # killed by `close` during its start
        self._drop(worker)
        return Score(math.nan, {}, False, f"reward {worker.running}: {problem}")

    def _drop(self, worker: _Worker) -> None:
        self._thread.worker = None
        self._workers.discard(worker)
        worker.kill()


class _Worker:
    """Controls one reward process, from one thread of the process that owns the pool."""

    def __init__(self, rewards: dict[str, RewardSpec], max_cpu_s: float) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo_components.rewards.pool", str(theirs.fileno())],
            # Pass on sys.path, because a Ray worker extends it without setting PYTHONPATH.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # own process group: `kill` also ends what rewards start
        )
        theirs.close()
        self._connection.send((rewards, max_cpu_s))
        self._ready, self._names = False, tuple(rewards)
        self.running = next(iter(rewards), "")
        """Name of the reward that is running, or ran last."""

    def score(self, sample: RewardInput, too_costly: list[str], timeout_s: float) -> Score:
        """Score one sample; the rewards in `too_costly` count as 0.

        Raises:
            TimeoutError: no score within `timeout_s`.
            EOFError: the process died.
            ConnectionError: the process died.
            RewardPoolError: the process did not start.
        """
        if not self._ready:
            self._wait_until_ready()
        self._connection.send((sample, too_costly))
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

    def _wait_until_ready(self) -> None:
        if not self._connection.poll(_START_TIMEOUT_S):
            raise RewardPoolError(
                f"rewards: their process did not start within {_START_TIMEOUT_S:g} s"
            )
        try:
            problem = self._connection.recv()
        except (EOFError, ConnectionError):
            problem = f"rewards cannot be built: their process ended ({', '.join(self._names)})"
        if problem is not None:
            raise RewardPoolError(problem)
        self._ready = True


def score_sample(
    rewards: Mapping[str, tuple[RewardSpec, Callable[..., float]]],
    sample: RewardInput,
    announce: Callable[[str], None],
    too_costly: Sequence[str] = (),
    max_cpu_s: float = _START_TIMEOUT_S,
) -> Score:
    """Apply all rewards to one sample.

    Args:
        rewards: spec and instance of each reward, by name.
        sample: keyword arguments, the same for each reward.
        announce: function that receives the name of each reward before the reward starts.
        too_costly: rewards to skip and count as 0, because the sample exceeded their CPU limit.
        max_cpu_s: upper bound of each reward's `response_cpu_s`. If a sample exceeds the limit, the
            kernel kills this process.
    """
    terms: dict[str, float] = {}
    success = False
    for name, (spec, reward) in rewards.items():
        announce(name)
        if name in too_costly:
            terms[name] = 0.0
            continue
        try:
            with _cpu_limit(getattr(reward, "response_cpu_s", None), max_cpu_s):
                value = float(reward(**sample))
            at_maximum = value >= getattr(reward, "max_reward", 1.0)
        except (Exception, SystemExit) as error:  # user code may raise anything
            problem = f"reward {name}: {type(error).__name__}: {error}"
            return Score(math.nan, {}, False, problem[:MAX_ERROR_CHARS])
        if not math.isfinite(value):
            return Score(math.nan, {}, False, f"reward {name}: gave {value}")
        terms[name] = value
        if spec.is_success:
            success = at_maximum
    total = sum(spec.weight * terms[name] for name, (spec, _) in rewards.items())
    if not math.isfinite(total):
        return Score(math.nan, {}, False, f"rewards: the weighted sum is {total}")
    return Score(total, terms, success, None)


@contextlib.contextmanager
def _cpu_limit(cpu_s: float | None, max_cpu_s: float) -> Iterator[None]:
    """Context manager: the kernel kills this process if the block takes more CPU time than allowed.

    The limit is the lesser of both arguments, in seconds; if `cpu_s` is None, there is no limit.
    """
    # No signal handler: during a huge power, for example, Python would run it only afterwards.
    if cpu_s is not None:
        signal.setitimer(signal.ITIMER_PROF, min(cpu_s, max_cpu_s))
    try:
        yield
    finally:
        if cpu_s is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _build(specs: dict[str, RewardSpec]) -> dict[str, tuple[RewardSpec, Callable[..., float]]]:
    built = {}
    for name, spec in specs.items():
        module, _, attribute = spec.component.rpartition(".")
        factory = getattr(importlib.import_module(module), attribute)
        built[name] = spec, factory(**spec.kwargs)
    return built


def _serve(connection: Connection) -> None:
    """Run a reward process: build the rewards, then score samples until the owner exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        specs, max_cpu_s = connection.recv()
        rewards = _build(specs)
    except Exception as error:  # sent to the owner, which raises it
        connection.send(f"rewards cannot be built: {type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            sample, too_costly = connection.recv()
        except EOFError:
            return
        limits = {"too_costly": too_costly, "max_cpu_s": max_cpu_s}
        connection.send(score_sample(rewards, sample, announce=connection.send, **limits))


if __name__ == "__main__":
    # Pickle names classes by module: import this file under the name that the owner uses.
    from grpo_components.rewards import pool as reward_pool

    reward_pool._serve(Connection(int(sys.argv[1])))

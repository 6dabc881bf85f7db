"""Rewards in processes of their own, with a deadline: a runaway sample stops nobody else."""

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
_END_S = 10.0
"""From when a process has closed its connection until it has ended."""
_PR_SET_PDEATHSIG = 1

_SHOWN = 1000
"""Characters of a failure's message that are kept: it may quote the whole response."""

_QUOTED = 80
"""Of a response's end, in the log."""

Sample = dict[str, str]
"""What a reward sees: prompt_text, response_text, answer, finish_reason."""


class RewardPoolError(RuntimeError):
    """The rewards cannot be built, or their processes not be started: no sample's fault."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward of the config."""

    component: str
    """Dotted path of its class."""
    kwargs: dict[str, Any]
    weight: float
    is_success: bool
    """Whether its maximum means success."""


@dataclass(frozen=True)
class Score:
    """What the rewards say of one sample."""

    reward: float
    """Weighted sum of the terms; NaN where one of them failed."""
    terms: dict[str, float]
    """Each reward by its name, unweighted."""
    success: bool
    error: str | None
    """Which reward failed, and how; None where none did."""


def reward_specs(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardSpec]:
    """The rewards of a config by name.

    Args:
        nodes: for each name a `_component_`, a weight, is_success, and the component's arguments.
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
    """Scores samples of many threads in a few processes.

    A reward that says what a response may cost, as `response_cpu_s`, has its process ended by the
    kernel where a response costs more; the response is worth 0 there, and the other rewards score
    it in a new process. At most half of the deadline is CPU time for one reward. Whatever else
    does not end in time is a failed sample.

    Args:
        rewards: by name.
        num_workers: processes, each driven by one thread of this process.
        timeout_s: deadline of one sample, from when its scoring starts.
    """

    def __init__(
        self, rewards: dict[str, RewardSpec], *, num_workers: int, timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._log = logging.getLogger(__name__)
        self._own = threading.local()
        self._workers: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        for _ in range(num_workers):  # start them now, without waiting
            self._threads.submit(self._started_worker)

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score samples and wait for all of them; from any thread.

        Args:
            samples: any number.

        Returns:
            The scores, in order.

        Raises:
            RewardPoolError: if the rewards cannot be built, or their processes not be started.
        """
        return list(self._threads.map(self._score_one, samples))

    def close(self) -> None:
        """End all reward processes, also those that are in the middle of a sample."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.copy():
            worker.kill()
        self._threads.shutdown()

    def _started_worker(self) -> _Worker:
        # Each thread keeps its own process: a process dies with the thread that started it.
        worker = getattr(self._own, "worker", None)
        if worker is None:
            with self._lock:  # or a process could be started behind the back of `close`
                if self._closed:
                    raise RewardPoolError("the reward pool is closed")
                try:
                    worker = self._own.worker = _Worker(self._rewards, self._timeout_s / 2)
                except OSError as error:
                    raise RewardPoolError(f"rewards: no process: {error}") from error
                self._workers.add(worker)
        return worker

    def _score_one(self, sample: Sample) -> Score:
        too_costly: list[str] = []
        while True:
            worker = self._started_worker()
            score = self._scored_by(worker, sample, too_costly)
            if score is not None:
                return score
            too_costly.append(worker.running)
            shown = sample["response_text"][-_QUOTED:]
            self._log.warning("reward %s: 0 for a response too costly: %r", worker.running, shown)

    def _scored_by(self, worker: _Worker, sample: Sample, too_costly: list[str]) -> Score | None:
        """The score by one process; None where the response cost the reward at work too much."""
        try:
            return worker.score(sample, too_costly, self._timeout_s)
        except TimeoutError:
            problem = f"TimeoutError after {self._timeout_s:g} s"
        except (EOFError, ConnectionError):
            if worker.cost_too_much():
                self._drop(worker)
                return None
            problem = "its process died"
        except RewardPoolError:
            if not self._closed:
                self._drop(worker)
                raise
            problem = "its process died"  # ended by `close` while it started
        self._drop(worker)
        return Score(math.nan, {}, False, f"reward {worker.running}: {problem}")

    def _drop(self, worker: _Worker) -> None:
        self._own.worker = None
        self._workers.discard(worker)
        worker.kill()


class _Worker:
    """One reward process, seen from its owner's thread."""

    def __init__(self, rewards: dict[str, RewardSpec], most_cpu_s: float) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo_components.rewards.pool", str(theirs.fileno())],
            # What the owner can import, it can import: a Ray worker's path is in no variable.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, to end with all that a reward has started
        )
        theirs.close()
        self._connection.send((rewards, most_cpu_s))
        self._ready, self._names = False, tuple(rewards)
        self.running = next(iter(rewards), "")
        """Name of the reward at work."""

    def score(self, sample: Sample, too_costly: list[str], timeout_s: float) -> Score:
        """Score one sample; rewards that it is too costly for give 0.

        Raises:
            TimeoutError: after `timeout_s`.
            EOFError: if the process died.
            ConnectionError: likewise.
            RewardPoolError: if it did not start.
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

    def cost_too_much(self) -> bool:
        """Whether a sample ended the process by its CPU time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S) == -signal.SIGPROF
        return False

    def kill(self) -> None:
        """End the process and those of its group, whatever they do; from any thread."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:  # until then nobody else has its number
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        if not self._connection.poll(_START_TIMEOUT_S):
            raise RewardPoolError(f"rewards: no process within {_START_TIMEOUT_S:g} s")
        try:
            problem = self._connection.recv()
        except (EOFError, ConnectionError):
            problem = f"rewards cannot be built: their process ended ({', '.join(self._names)})"
        if problem is not None:
            raise RewardPoolError(problem)
        self._ready = True


def score_sample(
    rewards: Mapping[str, tuple[RewardSpec, Callable[..., float]]],
    sample: Sample,
    announce: Callable[[str], None],
    too_costly: Sequence[str] = (),
    most_cpu_s: float = _START_TIMEOUT_S,
) -> Score:
    """Apply all rewards to one sample.

    Args:
        rewards: by name, each with its instance.
        sample: see `Sample`.
        announce: told the name of each reward before it starts.
        too_costly: rewards that give 0, because the sample costs them too much.
        most_cpu_s: seconds of CPU time for a reward that bounds what a response may cost it. What
            costs more ends the process.
    """
    terms: dict[str, float] = {}
    success = False
    for name, (spec, reward) in rewards.items():
        announce(name)
        if name in too_costly:
            terms[name] = 0.0
            continue
        try:
            with _bounded(getattr(reward, "response_cpu_s", None), most_cpu_s):
                value = float(reward(**sample))
            at_maximum = value >= getattr(reward, "max_reward", 1.0)
        except (Exception, SystemExit) as error:  # a user's code: this sample's failure, reported
            problem = f"reward {name}: {type(error).__name__}: {error}"
            return Score(math.nan, {}, False, problem[:_SHOWN])
        if not math.isfinite(value):
            return Score(math.nan, {}, False, f"reward {name}: gave {value}")
        terms[name] = value
        if spec.is_success:
            success = at_maximum
    total = sum(spec.weight * terms[name] for name, (spec, _) in rewards.items())
    if not math.isfinite(total):
        return Score(math.nan, {}, False, f"rewards: their weighted sum is {total}")
    return Score(total, terms, success, None)


@contextlib.contextmanager
def _bounded(cpu_s: float | None, most_cpu_s: float) -> Iterator[None]:
    """Let the kernel end this process at so much CPU time, whatever it is in the middle of."""
    if cpu_s is not None:  # no handler: one of Python's would wait for a huge power to end
        signal.setitimer(signal.ITIMER_PROF, min(cpu_s, most_cpu_s))
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
    """The reward process: build the rewards, then score samples until the owner ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        specs, most_cpu_s = connection.recv()
        rewards = _build(specs)
    except Exception as error:  # reported to the owner, who fails with it
        connection.send(f"rewards cannot be built: {type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            sample, too_costly = connection.recv()
        except EOFError:
            return
        bounds = {"too_costly": too_costly, "most_cpu_s": most_cpu_s}
        connection.send(score_sample(rewards, sample, announce=connection.send, **bounds))


if __name__ == "__main__":
    # Classes are pickled by module name, and this file's is not __main__ for its owner.
    from grpo_components.rewards import pool as reward_pool

    reward_pool._serve(Connection(int(sys.argv[1])))

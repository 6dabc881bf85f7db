"""Runs rewards in worker processes, with a deadline for each sample, in case a reward hangs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
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
"""Input of a reward: prompt_text, response_text, answer, finish_reason, and the other columns of
the data set's row. A reward gets only the columns that its signature accepts."""


NO_SCORE = "rewards: no score within the environment's limit; allowed: rewards that meet "
NO_SCORE += "timeouts.reward_s, and enough reward_workers"
"""The error of a sample that waited too long for its score."""


class RewardPoolError(RuntimeError):
    """The rewards cannot be built or their processes cannot start; no sample is to blame."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward in the config: how to build it, and how its value counts."""

    component: str
    """Dotted path of the reward's class or factory."""
    kwargs: dict[str, Any]
    weight: float
    is_success: bool
    """Whether this reward decides success: a sample succeeds if this reward is at its maximum."""


@dataclass(frozen=True)
class Score:
    """Score of a sample (response) by all rewards; reward processes also use it for one reward."""

    reward: float
    """Weighted sum of the terms; NaN if a reward failed."""
    terms: dict[str, float]
    """Unweighted value of each reward, by name."""
    success: bool
    """Whether the reward marked `is_success` is at its maximum."""
    error: str | None
    """None, or the failed reward's name with the file, line and message of the error. Further lines
    are the traceback in the reward's code."""
    used: dict[str, float] = field(default_factory=dict, compare=False)
    """Amounts that the rewards used for this sample, as `<reward>_<kind>`: `judge_requests`."""
    is_above: bool = field(default=False, compare=False)
    """Whether the reward gave more than its `max_reward`; False in a score from all rewards."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the reward took; 0 in a score from all rewards."""


def reward_specs(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardSpec]:
    """Read the `rewards` section of a config."""
    own = ("_component_", "weight", "is_success")
    specs: dict[str, RewardSpec] = {}
    for name, node in nodes.items():
        kwargs = {key: value for key, value in node.items() if key not in own}
        specs[name] = RewardSpec(node["_component_"], kwargs, node["weight"], node["is_success"])
    return specs


class RewardPool:
    """Scores samples in a few worker processes; many threads may call it (see docs/rewards.md)."""

    def __init__(
        self, rewards: dict[str, RewardSpec], *, num_workers: int, timeout_s: float
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._log = logging.getLogger(__name__)
        self._thread = threading.local()
        self._workers: set[Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        for _ in range(num_workers):  # start the processes now, but do not wait for them
            self._threads.submit(self._get_worker)

    def begin(self, sample: RewardInput) -> Future[Score]:
        """Start scoring a sample without waiting. Any thread may call this."""
        return self._threads.submit(self._score_one, sample)

    def __call__(self, samples: Sequence[RewardInput]) -> list[Score]:
        """Score samples and wait for all scores. Any thread may call this."""
        scores = [self.begin(each) for each in samples]
        return [score.result() for score in scores]

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
        terms, used = dict[str, float](), dict[str, float]()
        success, left_s = False, self._timeout_s
        for name, spec in self._rewards.items():
            score = self._ask(name, sample, left_s)
            used |= score.used
            if score.error:
                return Score(math.nan, {}, False, score.error, used)
            terms[name], left_s = score.reward, left_s - score.seconds
            success = score.success if spec.is_success else success
        total = sum(spec.weight * terms[name] for name, spec in self._rewards.items())
        if not math.isfinite(total):
            return Score(math.nan, {}, False, f"rewards: the weighted sum is {total}", used)
        return Score(total, terms, success, None, used)

    def _ask(self, name: str, sample: RewardInput, left_s: float) -> Score:
        worker, problem = self._get_worker(), "its process died"
        try:
            return worker.ask(name, sample, left_s)
        except TimeoutError:
            problem = f"TimeoutError: no score after {left_s:.3g} s"
        except (EOFError, ConnectionError):
            if worker.exceeded_cpu_limit():
                problem, end = "", sample["response_text"][-80:]
                self._log.warning("reward %s: 0, the response costs too much: %r", name, end)
        except RewardPoolError:
            if not self._closed:  # else killed by `close` during its start
                self._drop(worker)
                raise
        self._drop(worker)
        return Score(0.0, {}, False, problem and f"reward {name}: {problem}")

    def _drop(self, worker: Worker) -> None:
        self._thread.worker = None
        self._workers.discard(worker)
        worker.kill()


class Worker:
    """Starts one reward process and lets it score samples; for use by one thread.

    `max_cpu_s` caps the CPU limits that rewards have (`response_cpu_s`); 0 turns all limits off.
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
        self._names = list(rewards)
        self.has_perfect: dict[str, bool] = {}
        """Name of each reward built so far -> whether it has a `perfect_response`."""

    def wait_until_built(self) -> tuple[str, str]:
        """Wait until all rewards are built; return the name of one that failed, and its error.

        The error is one line, then the traceback of the user's code. Both are "" if none failed.
        """
        for name in self._names[len(self.has_perfect) :]:
            if not self._connection.poll(_START_TIMEOUT_S):
                return name, f"it did not answer within {_START_TIMEOUT_S:g} s"
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                return name, "its process ended"
            if isinstance(message, str):
                return name, message
            self.has_perfect[name] = message
        return "", ""

    def ask(
        self, name: str, sample: RewardInput, timeout_s: float, is_perfect: bool = False
    ) -> Score:
        """Let a reward score a sample; if `is_perfect`, score its `perfect_response` instead."""
        of, problem = self.wait_until_built()
        if problem:
            problem = problem.partition("\n")[0]
            raise RewardPoolError(f"rewards cannot be built: reward {of}: {problem}")
        self._connection.send((name, sample, is_perfect))
        if not self._connection.poll(max(0.0, timeout_s)):
            raise TimeoutError
        return self._connection.recv()

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

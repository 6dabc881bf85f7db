"""Measure the Python that a generator runs for each sample, outside of its engine.

    python benchmarks/rollout_python.py          # --groups, --repeats

A stand-in answers requests with prepared completions from one thread, so that what is left is the
generator's own: seeds, requests, futures, texts, rewards, records and packing. 512 samples are in
flight: 64 groups of 8. Rewards score at once, or are real processes (`MathCorrectness`, 2 workers),
whose own CPU seconds do not count. CPU seconds are those of this process, all threads together.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import statistics
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from measuring import machine_line, markdown_table
from omegaconf import OmegaConf

from grpo_components.config.components import SHIPPED_ENVIRONMENT, build_environment
from grpo_components.examples.tiny_policy import DEFAULT_OUTPUT_DIR, build_tiny_policy
from grpo_components.rewards.pool import RewardPool, RewardSpec, Score
from grpo_components.rollout import generator
from grpo_components.rollout.engine_use import EngineUse
from grpo_components.rollout.generator_options import EnvironmentKind, EnvironmentOptions
from grpo_components.rollout.multi_turn import MultiTurnEnvironment, Reply
from grpo_components.rollout.samples import Completion
from grpo_components.settings import GeneratorSettings

GROUP_SIZE, IN_FLIGHT, RESPONSE = 8, 64, 40
TURNS, TURN = 3, 12
"""Turns of a conversation, and sampled tokens of a turn."""


class StandInEngine:
    """Answers every request with the same tokens, from a thread as an engine does."""

    def __init__(self, size: int) -> None:
        self.use = EngineUse(GROUP_SIZE * IN_FLIGHT)
        logprobs, versions = np.full(size, -1, np.float32), np.zeros(size, np.int32)
        self._answer = Completion(np.arange(40, 40 + size), logprobs, versions, "stop")
        self._asked: queue.SimpleQueue[Future[Completion] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, *_: Any, **__: Any) -> Future[Completion]:
        """Queue one request."""
        future: Future[Completion] = Future()
        self._asked.put(future)
        return future

    def _run(self) -> None:
        while (future := self._asked.get()) is not None:
            future.set_result(self._answer)

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)


class InstantRewards:
    """Scores every sample at once."""

    def begin(self, sample: Any) -> Future[Score]:
        """Score a sample."""
        future: Future[Score] = Future()
        future.set_result(Score(1.0, {"correctness": 1.0}, True, None))
        return future

    def score(self, samples: Any) -> list[Score]:
        """Score samples."""
        return [Score(1.0, {"correctness": 1.0}, True, None) for _ in samples]

    __call__ = score

    def close(self) -> None:
        """Do nothing."""


def reward_processes() -> RewardPool:
    """Start the demo's reward in two processes."""
    path, arguments = "grpo_components.rewards.maths.MathCorrectness", {"answer_format": "gsm8k"}
    specs = {"correctness": RewardSpec(path, arguments, 1.0, True)}
    return RewardPool(specs, num_workers=2, timeout_s=60)


def tokenizer() -> Any:
    """Build the demo's tokenizer."""
    from torchtune.models.qwen2_5 import qwen2_5_tokenizer

    names = ("vocab.json", "merges.txt", "tokenizer.json")
    vocabulary, merges, special = (str(DEFAULT_OUTPUT_DIR / name) for name in names)
    return qwen2_5_tokenizer(vocabulary, merges, special_tokens_path=special)


def world(prompt: Any, seed: int) -> Any:
    """Begin a conversation that never ends by itself."""
    return lambda text: Reply("ok")


def measure(open_rewards: Any, kind: EnvironmentKind, groups: int) -> tuple[float, float, int]:
    """Return CPU seconds and wall seconds per sample, and the most threads at once."""
    build = partial(build_environment, OmegaConf.create(SHIPPED_ENVIRONMENT))
    if kind == "multi_turn":
        build = partial(MultiTurnEnvironment, TURNS, world)
    size = TURN if kind == "multi_turn" else RESPONSE
    generator.open_engine = lambda *_, **__: StandInEngine(size)  # pyright: ignore
    environment = EnvironmentOptions(build_environment=build, timeout_s=600, kind=kind)
    settings = GeneratorSettings(max_response_tokens=RESPONSE, temperature=1.0, stop_token_ids=[0])
    role = generator.Generator(
        build_tokenizer=tokenizer,
        settings=settings,
        engine=None,  # pyright: ignore -- the stand-in reads no options
        environment=environment,
        open_rewards=open_rewards,
        group_size=GROUP_SIZE,
        seed=0,
        rollouts_in_flight=IN_FLIGHT,
    )
    prompt = {"prompt_ids": np.arange(1, 15), "prompt_text": "3+4=", "answer": "7"}

    async def rollouts(count: int) -> int:
        numbers, most = iter(range(count)), 0

        async def lane() -> None:
            nonlocal most
            for number in numbers:
                asked = {**prompt, "prompt_index": number}
                _, summary, _ = await role.generate_group(asked, 0, number, 0, 1.0)
                assert not summary.errors, summary.errors[0]
                most = max(most, threading.active_count())

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        return most

    with asyncio.Runner() as loop:
        loop.run(rollouts(2 * IN_FLIGHT))  # the first groups build what later ones use
        cpu, wall = time.process_time(), time.perf_counter()
        most = loop.run(rollouts(groups))
    samples = groups * GROUP_SIZE
    found = (time.process_time() - cpu) / samples, (time.perf_counter() - wall) / samples, most
    role.close()
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    build_tiny_policy(DEFAULT_OUTPUT_DIR)
    rows: list[list[object]] = []
    for rewards, open_rewards in (("at once", InstantRewards), ("processes", reward_processes)):
        for kind in ("single_turn", "multi_turn", "torchrl"):
            found = [measure(open_rewards, kind, args.groups) for _ in range(args.repeats)]
            cpu, wall = (statistics.median(each[i] for each in found) * 1e3 for i in (0, 1))
            rows.append([rewards, kind, f"{cpu:.2f}", f"{wall:.2f}", max(e[2] for e in found)])
    head = ["rewards", "environment", "CPU ms per sample", "wall ms per sample", "threads"]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, rows)}\n")


if __name__ == "__main__":
    main()

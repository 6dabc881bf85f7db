"""Evaluation while training: held-out prompts, through the generators, at one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from omegaconf import DictConfig

from grpo_components.exchange.turns import Turns
from grpo_components.objective.schedules import Schedule
from grpo_components.running.role import Role
from grpo_components.running.step_metrics import evaluation_metrics
from grpo_components.running.supervision import RoleLostError

Scored = Callable[[int, list[dict[str, Any]]], list[dict[str, Any]]]


class Sampling(Protocol):
    """What an evaluation needs of a generator."""

    role: Role
    pulling: AbstractAsyncContextManager[Any]
    """Held while its weights are swapped, or must not be."""


class Evaluation:
    """Held-out success of the published weights; rollouts go on beside it.

    Args:
        held_out: rows of the evaluation data set.
        batch: responses that one generator samples at a time.
        temperature: by training step.
        timeout_s: longest wait for one batch.
        pull: brings a generator to the published weights; told what for.
        scored: by step and results, those results that have a score; it counts the others.
        turns: of the run.
    """

    def __init__(
        self,
        held_out: Sequence[Any],
        *,
        batch: int,
        temperature: Schedule,
        timeout_s: float,
        pull: Callable[[Any, str], Awaitable[None]],
        scored: Scored,
        turns: Turns,
    ) -> None:
        self._held_out, self._batch = held_out, batch
        self._temperature, self._timeout_s = temperature, timeout_s
        self._pull, self._scored, self._turns = pull, scored, turns

    async def __call__(self, step: int, generators: Sequence[Sampling]) -> dict[str, float]:
        """Evaluate.

        Args:
            step: training steps done.
            generators: of the run; those that were given up take no part.
        """
        while True:
            living = [generator for generator in generators if not generator.role.lost]
            shares = [
                self._evaluate_share(generator, range(i, len(self._held_out), len(living)), step)
                for i, generator in enumerate(living)
            ]
            results: list[Any] = await asyncio.gather(*shares, return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if not failures:
                everything = [result for share in results for result in share]
                return evaluation_metrics(self._scored(step, everything))
            for failure in failures:
                if not isinstance(failure, RoleLostError):  # else the others do its share
                    raise failure

    async def _evaluate_share(
        self, generator: Sampling, rows: Sequence[int], step: int
    ) -> list[dict[str, Any]]:
        prompts, role = [self._held_out[row] for row in rows], generator.role
        async with generator.pulling:  # nobody swaps the weights during an evaluation
            await self._pull(generator, f"evaluation {step}")
            timeout_s = self._timeout_s * (2 + len(prompts) // self._batch)
            temperature = self._temperature(step)
            turn = self._turns.awaited("evaluate", role=role.name, step=step)
            results = await role.call(
                "evaluate", prompts, temperature, timeout_s=timeout_s, turn=turn
            )
            self._turns.happened("evaluate", role=role.name, step=step)
            return results


def build_evaluation(
    cfg: DictConfig,
    held_out: Sequence[Any],
    temperature: Schedule,
    pull: Callable[[Any, str], Awaitable[None]],
    scored: Scored,
    turns: Turns,
) -> Evaluation:
    """The evaluation that a config asks for.

    Args:
        cfg: checked by preflight.
        held_out: rows of the evaluation data set.
        temperature: by training step.
        pull: brings a generator to the published weights; told what for.
        scored: by step and results, those results that have a score; it counts the others.
        turns: of the run.
    """
    return Evaluation(
        held_out,
        batch=cfg.group_size * cfg.rollouts_in_flight,
        temperature=temperature,
        timeout_s=cfg.timeouts.rollout_s,
        pull=pull,
        scored=scored,
        turns=turns,
    )

"""Evaluation while training: held-out prompts, through the generators, at one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.errors import RoleLostError
from grpo_components.evaluation.metrics import evaluation_metrics
from grpo_components.objective.schedules import Schedule, as_schedule
from grpo_components.offline.partial_runs import evaluated_version
from grpo_components.replay.event_order import Turns
from grpo_components.settings import Settings

Results = list[dict[str, Any]]
Scored = Callable[[int, Results], Results]
OnResult = Callable[[int, dict[str, float]], None]


Pull = Callable[[GeneratorHandle, str], Awaitable[None]]
"""Brings a generator to the published weights; the second argument says what for."""


class Evaluation:
    """Held-out success of the published weights; rollouts and training go on beside it.

    Args:
        held_out: rows of the evaluation data set; without any there are no evaluations.
        every_n_steps: between two of them; one more comes after the last step.
        num_steps: of the run.
        max_staleness: policy versions that training may be ahead of the weights it is about.
        first_version: policy version of the weights that generators start with.
        samples: responses to each row.
        batch: responses that one generator samples at a time.
        temperature: by training step; 0 is greedy.
        timeout_s: longest wait for one batch.
        scored: by step and results, those results that have a score; it counts the others.
        turns: of the run.
        on_result: called with step and metrics of each evaluation.
    """

    def __init__(
        self,
        held_out: Sequence[Any],
        *,
        every_n_steps: int,
        num_steps: int,
        max_staleness: int,
        first_version: int,
        samples: int,
        batch: int,
        temperature: Schedule,
        timeout_s: float,
        scored: Scored,
        turns: Turns,
        on_result: Sequence[OnResult],
    ) -> None:
        self._held_out, self._samples, self._batch = held_out, samples, batch
        self._every_n_steps, self._num_steps = every_n_steps, num_steps
        self._max_staleness, self._began = max_staleness, 0
        self._first_version = first_version
        self._temperature, self._timeout_s = temperature, timeout_s
        self._scored, self._turns, self._on_result = scored, turns, on_result
        self._running: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after so many training steps."""
        return step % self._every_n_steps == 0 or step >= self._num_steps

    async def begin(
        self, step: int, generators: Sequence[GeneratorHandle], pull: Pull, tasks: asyncio.TaskGroup
    ) -> None:
        """Start an evaluation of the published weights.

        Args:
            step: training steps done.
            generators: of the run; those that were given up take no part.
            pull: brings a generator to the published weights.
            tasks: what it runs in from here on, as soon as every generator holds the weights: only
                until then may no newer ones be published.
        """
        if not self._held_out:
            return
        assert self._running is None or self._running.done(), "two evaluations at once"
        pinned, self._began = asyncio.Event(), step
        self._running = tasks.create_task(self._evaluate(step, generators, pull, pinned))
        await pinned.wait()  # where it fails, the task group cancels this wait

    async def finished(self, step: int | None = None) -> dict[str, float]:
        """Metrics of the evaluation that has ended since the last call; nothing where none has.

        Args:
            step: training steps done; one that still runs is waited for where the next is due
                after another step, or none will come, or the groups of another step need newer
                weights than it lets the generators load. None waits always.
        """
        ahead = self._began + self._max_staleness
        due = step is None or step >= min(self._num_steps, ahead + 1) or self.due(step + 1)
        if due and self._running is not None:
            await asyncio.wait([self._running])
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _evaluate(
        self,
        step: int,
        generators: Sequence[GeneratorHandle],
        pull: Pull,
        pinned: asyncio.Event,
    ) -> None:
        async with AsyncExitStack() as held:
            held.enter_context(self._turns.pinning())
            for generator in generators:  # nobody swaps the weights during an evaluation
                if not generator.lost:
                    await held.enter_async_context(generator.swapping)
            results = None
            while results is None:
                results = await self._try(step, generators, pull, pinned)
        self._metrics = evaluation_metrics(self._scored(step, results))
        self._metrics["eval/policy_version"] += self._first_version
        for call in self._on_result:
            call(step, self._metrics)

    async def _try(
        self,
        step: int,
        generators: Sequence[GeneratorHandle],
        pull: Pull,
        pinned: asyncio.Event,
    ) -> Results | None:
        """All results, at one version; None where a generator was given up or restarted."""
        cause = f"evaluation {step}"
        living = [generator for generator in generators if not generator.lost]
        pulled = await _none_lost(pull(generator, cause) for generator in living)
        pinned.set()
        if pulled is None:
            return None
        shares = await _none_lost(
            self._ask(generator, range(i, len(self._held_out), len(living)), step)
            for i, generator in enumerate(living)
        )
        if shares is None:  # the others do its share
            return None
        results = [result for share in shares for result in share]
        # One that was restarted has the newest weights, which training may have published since.
        versions = {result[v] for result in results for v in ("oldest_version", "newest_version")}
        return results if len(versions - {None}) <= 1 else None

    async def _ask(self, generator: GeneratorHandle, rows: Sequence[int], step: int) -> Results:
        prompts = [self._held_out[row] for row in rows]
        timeout_s = self._timeout_s * (2 + len(prompts) * self._samples // self._batch)
        return await generator.evaluate(
            prompts, self._temperature(step), self._samples, step=step, timeout_s=timeout_s
        )


async def _none_lost(calls: Iterable[Awaitable[Any]]) -> list[Any] | None:
    """The results of calls side by side; None where a generator was given up meanwhile."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures:
        if not isinstance(failure, RoleLostError):
            raise failure
    return None if failures else results


def build_evaluation(
    cfg: Settings,
    held_out: Sequence[Any],
    temperature: Schedule,
    scored: Scored,
    turns: Turns,
    on_result: Sequence[OnResult],
) -> Evaluation:
    """The evaluation that a config asks for.

    Args:
        cfg: checked by preflight.
        held_out: rows of the evaluation data set.
        temperature: of training, by step: that of evaluations, too, unless the config has another.
        scored: by step and results, those results that have a score; it counts the others.
        turns: of the run.
        on_result: called with step and metrics of each evaluation.
    """
    own = cfg.eval.temperature
    return Evaluation(
        () if cfg.rollout_only or cfg.train_from else held_out,
        every_n_steps=cfg.eval_every_n_steps,
        num_steps=cfg.num_steps,
        max_staleness=cfg.max_staleness,
        first_version=evaluated_version(cfg),
        samples=cfg.eval.samples_per_prompt,
        batch=cfg.group_size * cfg.rollouts_in_flight,
        temperature=temperature if own is None else as_schedule("eval.temperature", own),
        timeout_s=cfg.timeouts.rollout_s,
        scored=scored,
        turns=turns,
        on_result=on_result,
    )

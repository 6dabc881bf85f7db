"""Evaluates during training: generators answer held-out prompts at one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.errors import RoleLostError
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.offline.partial_runs import evaluated_version
from grpo_components.schedules import Schedule, as_schedule
from grpo_components.settings import Settings

Results = list[dict[str, Any]]
_VERSIONS = ("oldest_version", "newest_version")
Ended = Callable[[int, Results], dict[str, float]]
"""Function that is called with the step and all results, failed ones too, after an evaluation; it
returns the evaluation's metrics."""
Pull = Callable[[GeneratorHandle, str], Awaitable[None]]
"""Function that loads the published weights into a generator; the text is the reason to record."""
PinWeights = Callable[[], AbstractContextManager[None]]
"""Function that returns a context manager. An evaluation enters it while it needs the same weights,
so that no wait in the `Ledger` times out meanwhile."""


class Evaluation:
    """Evaluates the published model weights on held-out prompts during rollouts and training."""

    def __init__(
        self,
        cfg: Settings,
        held_out: Sequence[Any],
        temperature: Schedule,
        pin_weights: PinWeights,
        ended: Ended,
    ) -> None:
        self._held_out, self._cfg = held_out if cfg.evaluates else (), cfg
        self.is_on = bool(self._held_out)
        """Whether there are prompts to evaluate on."""
        number = len(self._held_out)
        count = min(cfg.eval.prompts_logged, number)
        self._logged = {i * number // count for i in range(count)}
        """Rows of the prompts that are logged, spread evenly, the same in every evaluation."""
        self._contract = StalenessContract.of(cfg)
        self._began, self._first_version = 0, evaluated_version(cfg)
        given = cfg.eval.temperature
        self._temperature = temperature if given is None else as_schedule("eval.temperature", given)
        self._pin_weights, self._ended = pin_weights, ended
        self._running: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}

    def due(self, step: int) -> bool:
        """Whether an evaluation follows this training step."""
        is_time = step % self._cfg.eval_every_n_steps == 0 or step >= self._cfg.num_steps
        return self.is_on and is_time

    async def begin(
        self, step: int, generators: Sequence[GeneratorHandle], pull: Pull, tasks: asyncio.TaskGroup
    ) -> None:
        """Start an evaluation; wait until all generators have loaded the published weights.

        The caller must not publish newer weights before this returns.
        """
        assert self._running is None or self._running.done(), "two evaluations at once"
        pinned, self._began = asyncio.Event(), step
        self._running = tasks.create_task(self._evaluate(step, generators, pull, pinned))
        await pinned.wait()  # if the evaluation fails, the task group cancels this wait

    async def collect(self, step: int | None = None) -> dict[str, float]:
        """Return the metrics of an evaluation that ended since the last call; empty if none did.

        Waits for a running evaluation if it must end before the next step, or if `step` is None.
        """
        if self._running is not None and (step is None or self._must_end(step)):
            await asyncio.wait([self._running])
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _must_end(self, step: int) -> bool:
        # Steps are used as versions: after a skipped step, the wait only starts earlier.
        needs_newer_weights = not self._contract.may_train(self._began, step)
        return step >= self._cfg.num_steps or self.due(step + 1) or needs_newer_weights

    async def _evaluate(
        self,
        step: int,
        generators: Sequence[GeneratorHandle],
        pull: Pull,
        pinned: asyncio.Event,
    ) -> None:
        async with AsyncExitStack() as held:
            held.enter_context(self._pin_weights())
            for generator in generators:  # nobody swaps the weights during an evaluation
                if not generator.lost:
                    await held.enter_async_context(generator.swapping)
            results, tries = None, 0
            while results is None:
                tries += 1
                # Unique for each try: a replay would wait in the first for a pull of the second.
                cause = f"evaluation {step}" if tries == 1 else f"evaluation {step}, try {tries}"
                living = [generator for generator in generators if not generator.lost]
                pulled = await _none_lost(pull(generator, cause) for generator in living)
                pinned.set()
                if pulled is not None:
                    results = await self._answers(step, living)
        for result in results:
            for name in _VERSIONS:
                if result[name] is not None:
                    result[name] += self._first_version
        self._metrics = self._ended(step, results)

    async def _answers(self, step: int, living: Sequence[GeneratorHandle]) -> Results | None:
        """Return all answers; None if a generator was lost or restarted with newer weights."""
        shares = await _none_lost(
            self._ask(generator, range(i, len(self._held_out), len(living)), step)
            for i, generator in enumerate(living)
        )
        if shares is None:  # the next try gives the lost generator's prompts to the others
            return None
        results = [result for share in shares for result in share]
        # A restarted generator loads the newest weights, which may be newer than the others'.
        versions = {result[name] for result in results for name in _VERSIONS}
        return results if len(versions - {None}) <= 1 else None

    async def _ask(self, generator: GeneratorHandle, rows: Sequence[int], step: int) -> Results:
        prompts = [self._held_out[row] for row in rows]
        logged = [i for i, row in enumerate(rows) if row in self._logged]
        samples, batch = self._cfg.eval.samples_per_prompt, self._cfg.group_size
        batches = len(prompts) * samples // (batch * self._cfg.rollouts_in_flight)
        timeout_s = self._cfg.timeouts.rollout_s * (2 + batches)
        asked = (prompts, self._temperature(step), samples, logged)
        return await generator.evaluate(*asked, step=step, timeout_s=timeout_s)


async def _none_lost(calls: Iterable[Awaitable[Any]]) -> list[Any] | None:
    """Return the results of concurrent calls; None if a generator was lost."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures:
        if not isinstance(failure, RoleLostError):
            raise failure
    return None if failures else results

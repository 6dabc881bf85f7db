"""Examples of PTX, a supervised loss beside the policy loss: what the policy must not forget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_components.training.sample import TrainSample
from grpo_components.trajectory import Trajectory


class SupervisedExamples:
    """Prompts with desired responses; each optimizer update trains on a few of them.

    The choice depends only on the number of the update, so a resumed run continues the order.
    """

    def __init__(
        self,
        examples: Sequence[tuple[list[int], list[int]]],
        *,
        coeff: float,
        examples_per_update: int,
        seed: int,
    ) -> None:
        self.coeff, self._per_update, self._seed = coeff, examples_per_update, seed
        self._examples = examples

    def batch(self, update: int) -> list[TrainSample]:
        """Return the examples of one optimizer update."""
        first = update * self._per_update
        return [self._sample(place) for place in range(first, first + self._per_update)]

    def _sample(self, place: int) -> TrainSample:
        epoch, place = divmod(place, len(self._examples))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
        prompt_ids, response_ids = self._examples[order[place]]
        size = len(response_ids)
        trajectory = Trajectory(
            prompt_ids=np.array(prompt_ids, np.int64),
            response_ids=np.array(response_ids, np.int64),
            response_mask=np.ones(size, np.bool_),
            generator_logprobs=np.zeros(size, np.float32),  # unused: not sampled
            token_versions=np.zeros(size, np.int32),
            prompt_index=int(order[place]),
            epoch=epoch,
            group_id=0,
            attempt=0,
            finish_reason="stop",
        )
        return TrainSample(trajectory, trajectory.response_mask)

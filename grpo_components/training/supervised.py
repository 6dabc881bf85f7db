"""PTX: a supervised loss added to the policy loss, on examples the policy must not forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from grpo_components.training.sample import TrainSample
from grpo_components.training.token_metrics import UpdateMetrics
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


class SupervisedLoss:
    """Minimizes coeff x mean negative log-likelihood of the examples' tokens, over all ranks.

    This is the pretraining mix of InstructGPT, arXiv 2203.02155, eq. 2 (gamma is `coeff`).
    """

    def __init__(
        self,
        examples: SupervisedExamples,
        forward: Callable[[list[TrainSample]], tuple[Tensor, Tensor]],
        plan: Callable[[list[TrainSample]], Sequence[Sequence[int]]],
        num_data_ranks: int,
    ) -> None:
        self._examples, self._forward, self._plan = examples, forward, plan
        self._num_data_ranks = num_data_ranks

    def backward(self, update: int, measured: UpdateMetrics, policy_tokens: int) -> None:
        """Add the gradient of this loss to the parameters' gradients; collective."""
        coeff = self._examples.coeff
        if coeff == 0:
            return
        samples = self._examples.batch(update)
        total = sum(sample.num_tokens for sample in samples)
        for indices in self._plan(samples):
            members = [samples[i] for i in indices]
            logprobs = self._forward(members or samples[:1])[0]  # idle ranks join collectives
            losses = -logprobs / total * (1.0 if members else 0.0)
            (losses.sum() * (coeff * self._num_data_ranks)).backward()
            shares = losses.detach() * policy_tokens
            measured.add({"loss/ptx": shares, "loss/total": coeff * shares})

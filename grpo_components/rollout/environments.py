"""The single-turn torchrl environment, and the specs that all torchrl environments share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from grpo_components.data.columns import reward_input
from grpo_components.rewards.pool import RewardInput, Score
from grpo_components.rollout.samples import Prompt


def set_token_specs(env: EnvBase, num_slots: int) -> None:
    """Set an environment's torchrl specs: token lists of any length, one per slot (response)."""
    slots = torch.Size([num_slots])
    ragged: Any = (num_slots, -1)
    env.observation_spec = Composite(tokens=Unbounded(shape=ragged, dtype=torch.int64), shape=slots)
    env.action_spec = Composite(
        response=Unbounded(shape=ragged, dtype=torch.int64),
        finish_reason=NonTensor(shape=slots),
        shape=slots,
    )
    env.reward_spec = Composite(reward=Unbounded(shape=torch.Size([num_slots, 1])), shape=slots)
    flag = Binary(1, shape=torch.Size([num_slots, 1]), dtype=torch.bool)
    env.done_spec = Composite(
        done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=slots
    )


def slot_state(tokens: Any, *, done: bool, truncated: bool = False) -> TensorDict:
    """Build one slot's part of the TensorDict that an environment's `reset` or `step` returns."""
    return TensorDict(
        tokens=torch.as_tensor(tokens, dtype=torch.int64),
        done=torch.tensor([done]),
        terminated=torch.tensor([done and not truncated]),
        truncated=torch.tensor([truncated]),
    )


class SingleTurnEnvironment(EnvBase):
    """torchrl environment that shows one prompt per slot, and scores the response.

    Args:
        num_slots: number of prompts at once; a group contains its prompt `group_size` times.
        decode: function that converts token ids to text.
        score: function that returns the scores of samples, in order. A sample has prompt_text,
            response_text, answer, finish_reason, and the columns of its row in the data set.
        encode: not used.
        max_response_tokens: not used.
    """

    # Ragged token lists: keep torchrl from preallocating buffers from the specs.
    _has_dynamic_specs_override = True

    def __init__(
        self,
        *,
        num_slots: int,
        decode: Callable[[list[int]], str],
        score: Callable[[list[RewardInput]], list[Score]],
        encode: Any = None,
        max_response_tokens: Any = None,
    ) -> None:
        super().__init__(batch_size=torch.Size([num_slots]), device=None)
        self._decode, self._score = decode, score
        self._prompts: list[Prompt] = []
        set_token_specs(self, num_slots)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Set the prompts of the next `reset`, one per slot."""
        assert len(prompts) == self.batch_size[0], "one prompt per slot"
        self._prompts = list(prompts)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> LazyStackedTensorDict:
        return lazy_stack([slot_state(p["prompt_ids"], done=False) for p in self._prompts], 0)

    def _step(self, tensordict: TensorDictBase) -> LazyStackedTensorDict:
        slots = tensordict.unbind(0)
        samples = [
            reward_input(prompt, self._decode(slot["response"].tolist()), slot["finish_reason"])
            for prompt, slot in zip(self._prompts, slots, strict=True)
        ]
        results = []
        for slot, score in zip(slots, self._score(samples), strict=True):
            result = slot_state(torch.cat([slot["tokens"], slot["response"]]), done=True)
            result["reward"] = torch.tensor([score.reward])
            result["score"] = NonTensorData(score)
            results.append(result)
        return lazy_stack(results, 0)

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: only the engine samples, with the seeds of its requests."""

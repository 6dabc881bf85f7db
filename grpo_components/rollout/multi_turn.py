"""The multi-turn environment: the policy takes turns with a world, a function that replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs import EnvBase

from grpo_components.data.columns import reward_input
from grpo_components.objective.component_errors import defined_at
from grpo_components.rewards.pool import RewardInput, Score
from grpo_components.rollout.environments import Prompt, set_token_specs, slot_state

_MAX_TOKEN_CHARS = 1000
"""Upper bound on the characters of one token, in any vocabulary."""


@dataclass(frozen=True)
class Reply:
    """The world's reply to one turn of the policy.

    Raises:
        ValueError: a field has the wrong type, or a reward is not finite.
    """

    text: str = ""
    """Text for the policy to read before its next turn; ignored if `done`."""
    done: bool = False
    """Whether the conversation is over."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of this turn by name; added to the sample's reward without a weight."""
    answer: str | None = None
    """Answer by which the config's rewards judge the last turn; None uses the prompt's answer."""

    def __post_init__(self) -> None:
        """Check the fields at construction, so that a traceback shows the line in the world."""
        fits = {
            "text": (isinstance(self.text, str), "a text"),
            "done": (isinstance(self.done, bool | np.bool_), "True or False"),
            "rewards": (_are_rewards(self.rewards), "finite numbers by name"),
            "answer": (self.answer is None or isinstance(self.answer, str), "a text or None"),
        }
        for name, (right, allowed) in fits.items():
            if not right:
                given = f"Reply.{name}: {getattr(self, name)!r:.100} given"
                raise ValueError(f"{given}; allowed: {allowed}")


def _are_rewards(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(value, Real) and math.isfinite(value)
        for name, value in given.items()
    )


World = Callable[[Prompt, int], Callable[[str], Reply]]
"""Function that begins a conversation, `world(prompt, seed)`. It returns a function that takes the
text of a turn and returns a `Reply`. All randomness must come from the seed, so that a repeated
group is identical."""


@dataclass
class _Conversation:
    """State of one slot's conversation."""

    prompt: Prompt
    respond: Callable[[str], Reply]
    num_turns: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    last: TensorDict | None = None
    """State of the slot after the conversation ended."""


class MultiTurnEnvironment(EnvBase):
    """Lets the policy and a world take turns, without ever tokenizing a text twice.

    The policy's token ids stay as sampled. The world's text is tokenized separately and appended.
    A response ends when the world ends it, or at a limit: after `max_turns`, or if no room is left
    for the world's text and one more token. At a limit, `finish_reason` is `length`.

    The reward of a sample is the sum of two parts: the config's rewards for the policy's last turn,
    and the world's rewards for all turns. `reward_terms` holds each of them by name.

    Args:
        num_slots: number of conversations at once.
        decode: function that converts token ids to text.
        encode: function that converts text to token ids, without tokens for beginning or end of
            sequence.
        score: function that returns the scores of samples (prompt_text, response_text, answer,
            finish_reason, and the columns of the row), in their order.
        max_response_tokens: longest response in tokens, including the world's.
        max_turns: largest number of turns of the policy.
        world: function that begins each conversation, see `World`.
    """

    # Ragged token lists: keep torchrl from preallocating buffers from the specs.
    _has_dynamic_specs_override = True
    slots_apart = True
    """Each slot gets its own environment and thread, so that no slot waits for another."""

    def __init__(
        self,
        *,
        num_slots: int,
        decode: Callable[[list[int]], str],
        encode: Callable[[str], Sequence[int]],
        score: Callable[[list[RewardInput]], list[Score]],
        max_response_tokens: int,
        max_turns: int,
        world: World,
    ) -> None:
        super().__init__(batch_size=torch.Size([num_slots]), device=None)
        self._decode, self._encode, self._score = decode, encode, score
        self._max_response_tokens, self._max_turns = max_response_tokens, max_turns
        self.world = world
        self._prompts: list[Prompt] = []
        self._conversations: list[_Conversation] = []
        set_token_specs(self, num_slots)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Set the prompts of the next `reset`, one per slot."""
        assert len(prompts) == self.batch_size[0], "one prompt per slot"
        self._prompts = list(prompts)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> LazyStackedTensorDict:
        self._conversations = [_Conversation(p, self._begin(p)) for p in self._prompts]
        return lazy_stack([slot_state(p["prompt_ids"], done=False) for p in self._prompts], 0)

    def _step(self, tensordict: TensorDictBase) -> LazyStackedTensorDict:
        results, ended, samples = [], [], []
        for conversation, slot in zip(self._conversations, tensordict.unbind(0), strict=True):
            if conversation.last is not None:
                results.append(conversation.last)
                continue
            result, sample = self._take_turn(conversation, slot)
            results.append(result)
            if sample is not None:
                ended.append((conversation, result))
                samples.append(sample)
        scores = self._score(samples) if samples else []
        for (conversation, result), score in zip(ended, scores, strict=True):
            total = _add_turn_rewards(score, conversation.terms)
            result["score"] = NonTensorData(total)
            result["reward"] = result["reward"] + score.reward
            conversation.last = result
        return lazy_stack(results, 0)

    def _begin(self, prompt: Prompt) -> Callable[[str], Reply]:
        # A copy, so that a world that changes its prompt affects no other conversation.
        respond = self.world(deepcopy(prompt), prompt["seed"])
        if not callable(respond):
            where = defined_at(self.world)
            raise TypeError(f"the world returned {respond!r:.100}{where}; allowed: a function")
        return respond

    def _take_turn(
        self, conversation: _Conversation, slot: TensorDictBase
    ) -> tuple[TensorDict, RewardInput | None]:
        """Advance one slot by a turn; return its state, and the sample to score if it has ended."""
        prompt, finish_reason = conversation.prompt, slot["finish_reason"]
        text = self._decode(slot["response"].tolist())
        reply = conversation.respond(text)
        if not isinstance(reply, Reply):
            where = defined_at(conversation.respond)
            raise TypeError(f"the world replied {reply!r:.100}{where}; allowed: a Reply")
        conversation.num_turns += 1
        for name, value in reply.rewards.items():
            conversation.terms[name] = conversation.terms.get(name, 0.0) + float(value)
        tokens = torch.cat([slot["tokens"], slot["response"]])
        room = self._max_response_tokens - (len(tokens) - len(prompt["prompt_ids"])) - 1
        last = conversation.num_turns == self._max_turns or finish_reason != "stop"
        reply_ids = None if reply.done or last else self._encode_reply(reply.text, room)
        over = reply_ids is None
        cut_off = finish_reason != "stop" or (over and not reply.done)
        if reply_ids is not None:
            tokens = torch.cat([tokens, reply_ids])
        elif cut_off and finish_reason == "stop":
            finish_reason = "length"
        result = slot_state(tokens, done=over, truncated=cut_off)
        result["reward"] = torch.tensor([float(sum(reply.rewards.values()))])
        result["score"] = NonTensorData(None)
        result["finish_reason"] = NonTensorData(finish_reason)
        if not over:
            return result, None
        return result, reward_input(prompt, text, finish_reason, reply.answer)

    def _encode_reply(self, text: str, room: int) -> Tensor | None:
        """Return the token ids [R] of the world's text; None if they do not fit into `room`."""
        if room < 0 or len(text) > room * _MAX_TOKEN_CHARS:  # a very long text is slow to tokenize
            return None
        token_ids = self._encode(text)
        return torch.tensor(token_ids, dtype=torch.int64) if len(token_ids) <= room else None

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: each conversation gets its seed from its prompt."""


def _add_turn_rewards(score: Score, terms: Mapping[str, float]) -> Score:
    """Add the world's rewards of all turns to the score of the last turn."""
    if duplicates := sorted(terms.keys() & score.terms.keys()):
        allowed = "a name that is not in the config's rewards"
        raise ValueError(f"Reply.rewards: {duplicates[0]!r} given; allowed: {allowed}")
    return replace(score, reward=score.reward + sum(terms.values()), terms={**terms, **score.terms})

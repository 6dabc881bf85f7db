"""The environment of several turns: between two of the policy's, a world says something."""

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

from grpo_components.rewards.pool import Score
from grpo_components.rollout.environments import Prompt, set_token_specs, slot_state

_LONGEST_TOKEN = 1000
"""Characters: more than any vocabulary has in one."""


@dataclass(frozen=True)
class Reply:
    """What a world answers to one turn of the policy.

    Raises:
        ValueError: naming the part that is of another kind, or a reward that is not finite.
    """

    text: str = ""
    """Said to the policy, which then has its next turn; not used where `done`."""
    done: bool = False
    """The conversation is over: the turn was its last."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of this turn, by name; added to the sample's reward as they are."""
    answer: str | None = None
    """What the config's rewards compare the last turn with; None is the prompt's own answer."""

    def __post_init__(self) -> None:
        """Fail where the world made it, and not turns later."""
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
"""`world(prompt, seed)` begins a conversation; what it returns answers each of the policy's turns.
All that is random in it must come from the seed: then a repeated group is the same."""


@dataclass
class _Conversation:
    """One slot's, as far as it has come."""

    prompt: Prompt
    respond: Callable[[str], Reply]
    num_turns: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    last: TensorDict | None = None
    """The slot's state once it is over."""


class MultiTurnEnvironment(EnvBase):
    """Lets the policy and a world take turns, as token ids that are never made from text twice.

    The policy's ids stay as they were sampled; what the world says is tokenised alone and appended.
    A response ends when the world says so, or at a limit: after `max_turns`, or where no room is
    left for the world's words and another token. Then its `finish_reason` is `length`.

    The sample's reward is that of the config's rewards, which judge the policy's last turn, plus
    the sum of what the world gave for each turn; each is in `reward_terms` by its name.

    Args:
        num_slots: conversations at once.
        decode: token ids to text.
        encode: text to token ids, without a beginning or end of sequence.
        score: samples (prompt_text, response_text, answer, finish_reason) to scores, in order.
        max_response_tokens: longest response, in tokens, the world's included.
        max_turns: of the policy.
        world: see `World`.
    """

    # Token lists are ragged, so that torchrl must not preallocate from the specs.
    _has_dynamic_specs_override = True
    slots_apart = True
    """Each slot gets an environment and a thread of its own, so that none waits for another."""

    def __init__(
        self,
        *,
        num_slots: int,
        decode: Callable[[list[int]], str],
        encode: Callable[[str], Sequence[int]],
        score: Callable[[list[dict[str, str]]], list[Score]],
        max_response_tokens: int,
        max_turns: int,
        world: World,
    ) -> None:
        super().__init__(batch_size=torch.Size([num_slots]), device=None)
        self._decode, self._encode, self._score = decode, encode, score
        self._max_response_tokens, self._max_turns = max_response_tokens, max_turns
        self._world = world
        self._prompts: list[Prompt] = []
        self._conversations: list[_Conversation] = []
        set_token_specs(self, num_slots)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Set the prompts, one per slot, of the next `reset`."""
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
            total = _with_turns(score, conversation.terms)
            result["score"] = NonTensorData(total)
            result["reward"] = result["reward"] + score.reward
            conversation.last = result
        return lazy_stack(results, 0)

    def _begin(self, prompt: Prompt) -> Callable[[str], Reply]:
        # Its own: a board that one conversation changes is not another's, nor the next time's.
        respond = self._world(deepcopy(prompt), prompt["seed"])
        if not callable(respond):
            raise TypeError(f"the world began with {respond!r:.100}; allowed: what can be called")
        return respond

    def _take_turn(
        self, conversation: _Conversation, slot: TensorDictBase
    ) -> tuple[TensorDict, dict[str, str] | None]:
        """One slot after the policy's turn; and the sample to score, if it was the last."""
        prompt, finish_reason = conversation.prompt, slot["finish_reason"]
        text = self._decode(slot["response"].tolist())
        reply = conversation.respond(text)
        if not isinstance(reply, Reply):
            raise TypeError(f"the world answered {reply!r:.100}; allowed: a Reply")
        conversation.num_turns += 1
        for name, value in reply.rewards.items():
            conversation.terms[name] = conversation.terms.get(name, 0.0) + float(value)
        tokens = torch.cat([slot["tokens"], slot["response"]])
        room = self._max_response_tokens - (len(tokens) - len(prompt["prompt_ids"])) - 1
        last = conversation.num_turns == self._max_turns or finish_reason != "stop"
        said = None if reply.done or last else self._said(reply.text, room)
        over = said is None
        cut_off = finish_reason != "stop" or (over and not reply.done)
        if said is not None:
            tokens = torch.cat([tokens, said])
        elif cut_off and finish_reason == "stop":
            finish_reason = "length"
        result = slot_state(tokens, done=over, truncated=cut_off)
        result["reward"] = torch.tensor([float(sum(reply.rewards.values()))])
        result["score"] = NonTensorData(None)
        result["finish_reason"] = NonTensorData(finish_reason)
        if not over:
            return result, None
        sample = {
            "prompt_text": prompt["prompt_text"],
            "response_text": text,
            "answer": prompt["answer"] if reply.answer is None else reply.answer,
            "finish_reason": finish_reason,
        }
        return result, sample

    def _said(self, text: str, room: int) -> Tensor | None:
        """The world's words as token ids; None where they have no room."""
        if room < 0 or len(text) > room * _LONGEST_TOKEN:  # a whole book takes long to tokenize
            return None
        token_ids = self._encode(text)
        return torch.tensor(token_ids, dtype=torch.int64) if len(token_ids) <= room else None

    def _set_seed(self, seed: int | None) -> None:
        """Nothing here is random but the worlds, which get a seed for each conversation."""


def _with_turns(score: Score, terms: Mapping[str, float]) -> Score:
    """A score of the last turn, and what the world gave in all turns, as one."""
    if twice := sorted(terms.keys() & score.terms.keys()):
        raise ValueError(f"the world's reward {twice[0]} has the name of one of the config's")
    return replace(score, reward=score.reward + sum(terms.values()), terms={**terms, **score.terms})

"""The single-turn environment shows its prompts and scores the responses, slot by slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from tensordict import NonTensorData, TensorDict, lazy_stack

from grpo_components.rewards.pool import Score
from grpo_components.rollout.environments import SingleTurnEnvironment

TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=12)
SLOTS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)


def decode(token_ids):
    return " ".join(str(token_id) for token_id in token_ids)


def by_position(samples):
    """Scores that differ between slots."""
    return [Score(float(i), {"place": float(i)}, i == 0, None) for i in range(len(samples))]


def prompt(number, token_ids):
    return {
        "prompt_index": number,
        "prompt_ids": token_ids,
        "prompt_text": f"question {number}",
        "answer": f"answer {number}",
    }


def make(prompts, score=by_position):
    environment = SingleTurnEnvironment(num_slots=len(prompts), decode=decode, score=score)
    environment.ask([prompt(i, ids) for i, ids in enumerate(prompts)])
    return environment


def answer(state, responses, reasons):
    """Write a response into every slot, as a policy does."""
    slots = state.unbind(0)
    for slot, response, reason in zip(slots, responses, reasons, strict=True):
        slot.update(
            TensorDict(response=torch.tensor(response), finish_reason=NonTensorData(reason))
        )
    return lazy_stack(list(slots), 0)


@settings(max_examples=many(30))
@given(SLOTS, st.data())
def test_each_slot_shows_its_prompt_and_ends_with_its_own_response_and_score(slots, data):
    reason = st.sampled_from(["stop", "length"])
    reasons = data.draw(st.lists(reason, min_size=len(slots), max_size=len(slots)))
    seen = []

    def score(samples):
        seen.extend(samples)
        return by_position(samples)

    environment = make([ids for ids, _ in slots], score)
    state = environment.reset()
    assert [slot["tokens"].tolist() for slot in state.unbind(0)] == [ids for ids, _ in slots]
    assert not any(bool(slot["done"]) for slot in state.unbind(0))
    after = environment.step(answer(state, [r for _, r in slots], reasons))["next"]
    for i, (slot, (asked, said)) in enumerate(zip(after.unbind(0), slots, strict=True)):
        assert slot["tokens"].tolist() == asked + said
        assert slot["tokens"].dtype == torch.int64
        assert bool(slot["done"]) and bool(slot["terminated"]) and not bool(slot["truncated"])
        assert slot["reward"].tolist() == [float(i)]
        assert slot["score"] == Score(float(i), {"place": float(i)}, i == 0, None)
    assert seen == [
        {
            "prompt_text": f"question {i}",
            "response_text": decode(response),
            "answer": f"answer {i}",
            "finish_reason": reasons[i],
        }
        for i, (_, response) in enumerate(slots)
    ]


def test_fewer_scores_than_slots_are_an_error():
    environment = make([[1], [2]], lambda samples: by_position(samples)[:1])
    with pytest.raises(ValueError):
        environment.step(answer(environment.reset(), [[4], [5]], ["stop"] * 2))

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


def answer(state, responses, reasons=None):
    """Write a response into every slot, as a policy does."""
    slots = state.unbind(0)
    for i, (slot, response) in enumerate(zip(slots, responses, strict=True)):
        reason = reasons[i] if reasons else "stop"
        slot.update(
            TensorDict(response=torch.tensor(response), finish_reason=NonTensorData(reason))
        )
    return lazy_stack(list(slots), 0)


@settings(max_examples=many(30))
@given(SLOTS)
def test_a_reset_shows_the_prompts_unpadded_and_in_order(slots):
    state = make([ids for ids, _ in slots]).reset()
    assert [slot["tokens"].tolist() for slot in state.unbind(0)] == [ids for ids, _ in slots]
    assert not any(bool(slot["done"]) for slot in state.unbind(0))


@settings(max_examples=many(30))
@given(SLOTS)
def test_a_step_appends_each_response_to_its_own_prompt_and_ends_the_slot(slots):
    environment = make([ids for ids, _ in slots])
    after = environment.step(answer(environment.reset(), [r for _, r in slots]))["next"]
    for i, (slot, (asked, said)) in enumerate(zip(after.unbind(0), slots, strict=True)):
        assert slot["tokens"].tolist() == asked + said
        assert slot["tokens"].dtype == torch.int64
        assert bool(slot["done"]) and bool(slot["terminated"]) and not bool(slot["truncated"])
        assert slot["reward"].tolist() == [float(i)]
        assert slot["score"] == Score(float(i), {"place": float(i)}, i == 0, None)


@settings(max_examples=many(30))
@given(SLOTS, st.data())
def test_the_score_sees_text_answer_and_finish_reason_of_every_slot_in_order(slots, data):
    reason = st.sampled_from(["stop", "length"])
    reasons = data.draw(st.lists(reason, min_size=len(slots), max_size=len(slots)))
    seen = []

    def score(samples):
        seen.extend(samples)
        return by_position(samples)

    environment = make([ids for ids, _ in slots], score)
    environment.step(answer(environment.reset(), [r for _, r in slots], reasons))
    assert seen == [
        {
            "prompt_text": f"question {i}",
            "response_text": decode(response),
            "answer": f"answer {i}",
            "finish_reason": reasons[i],
        }
        for i, (_, response) in enumerate(slots)
    ]


def test_a_failed_score_keeps_its_error_and_leaves_the_other_slots_alone():
    failed = Score(float("nan"), {}, False, "correctness: timed out")
    fine = Score(0.5, {"correctness": 0.5}, False, None)
    environment = make([[1], [2, 3]], lambda samples: [failed, fine])
    after = environment.step(answer(environment.reset(), [[4], [5]]))["next"].unbind(0)
    assert after[0]["score"] is failed and after[0]["reward"].isnan().all()
    assert after[1]["score"] is fine and after[1]["reward"].item() == 0.5
    assert all(bool(slot["done"]) for slot in after)


def test_every_reset_starts_from_the_last_prompts():
    environment = make([[1, 2], [3]])
    environment.step(answer(environment.reset(), [[7], [8, 9]]))
    again = environment.reset()
    assert [slot["tokens"].tolist() for slot in again.unbind(0)] == [[1, 2], [3]]
    environment.ask([prompt(5, [6, 6, 6]), prompt(6, [4])])
    other = environment.reset()
    assert [slot["tokens"].tolist() for slot in other.unbind(0)] == [[6, 6, 6], [4]]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_other_than_one_prompt_per_slot_is_a_bug(number):
    environment = SingleTurnEnvironment(num_slots=2, decode=decode, score=by_position)
    with pytest.raises(AssertionError):
        environment.ask([prompt(i, [1]) for i in range(number)])


def test_fewer_scores_than_slots_are_an_error():
    environment = make([[1], [2]], lambda samples: by_position(samples)[:1])
    with pytest.raises(ValueError):
        environment.step(answer(environment.reset(), [[4], [5]]))

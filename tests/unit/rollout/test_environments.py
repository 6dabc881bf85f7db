"""Environments of torchrl, the shipped one and one's own, are stepped slot by slot."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.engine import StandInEngine, completion
from lib.properties import many
from lib.rows import prompt
from tensordict import NonTensorData, lazy_stack
from torchrl.envs import EnvBase

from grpo_components.rewards.pool import Score
from grpo_components.rollout.environments import (
    SingleTurnEnvironment,
    set_token_specs,
    slot_state,
)
from grpo_components.rollout.samples import Sample
from grpo_components.settings import GeneratorSettings

TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=12)
SLOTS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)


def decode(token_ids):
    return " ".join(str(token_id) for token_id in token_ids)


def by_position(samples):
    """Scores that differ between slots."""
    return [Score(float(i), {"place": float(i)}, i == 0, None) for i in range(len(samples))]


def make(prompts, score=by_position):
    environment = SingleTurnEnvironment(num_slots=len(prompts), decode=decode, score=score)
    environment.ask([prompt(i, ids) for i, ids in enumerate(prompts)])
    return environment


def answer(state, responses, reasons):
    """Write a response into every slot, as a policy does."""
    slots = state.unbind(0)
    for slot, response, reason in zip(slots, responses, reasons, strict=True):
        slot["response"], slot["finish_reason"] = torch.tensor(response), NonTensorData(reason)
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


# ---- in a collector -----------------------------------------------------------------------------


class Countdown(EnvBase):
    """Slot `i` ends after `i + 1` turns, and shows a 9 after each other one."""

    _has_dynamic_specs_override = True

    def __init__(self, num_slots):
        super().__init__(batch_size=torch.Size([num_slots]), device=None)
        set_token_specs(self, num_slots)

    def ask(self, prompts):
        pass

    def _reset(self, tensordict=None, **_):
        self.left = list(range(1, self.batch_size[0] + 1))
        return lazy_stack([slot_state([1], done=False) for _ in self.left], 0)

    def _step(self, tensordict):
        results = []
        for i, slot in enumerate(tensordict.unbind(0)):
            self.left[i] -= 1
            done = self.left[i] <= 0
            shown = torch.tensor([] if done else [9], dtype=torch.int64)
            result = slot_state(torch.cat([slot["tokens"], slot["response"], shown]), done=done)
            result["reward"] = torch.tensor([0.0])
            result["score"] = NonTensorData(Score(float(i), {}, True, None) if done else None)
            result["finish_reason"] = NonTensorData("stop")
            results.append(result)
        return lazy_stack(results, 0)

    def _set_seed(self, seed):
        pass


@pytest.fixture
def collector(engine_variables):
    from grpo_components.rollout import collector

    return collector


async def at_once(function, *args):
    return function(*args)


SAMPLES = [Sample(prompt(0), "a", seed) for seed in range(3)]


def collector_of(collector, env, engine):
    settings = GeneratorSettings(max_response_tokens=8, temperature=1.0, stop_token_ids=[0])
    return collector.GroupCollector(env, engine, settings)


def test_slots_of_one_environment_end_one_by_one_and_then_stay_as_they_are(collector):
    engine = StandInEngine(lambda request: completion([5, 6], len(request.prompt_ids)))
    made = collector_of(collector, Countdown(3), engine)
    assert not engine.requests, "torchrl would reset an environment in the constructor"
    for _ in range(2):  # a second rollout of the same collector starts afresh
        records = [record for (record,), *_ in asyncio.run(made.rollout(SAMPLES, at_once))]
        said = [[5, 6], [5, 6, 9, 5, 6], [5, 6, 9, 5, 6, 9, 5, 6]]
        assert [record.response_ids.tolist() for record in records] == said
        assert records[2].response_mask.tolist() == [True, True, False] * 2 + [True, True]
        assert records[2].token_versions.tolist() == [1, 1, -1, 4, 4, -1, 7, 7]
        assert [record.reward for record in records] == [0.0, 1.0, 2.0]
    seeds = [request.seed for request in engine.requests]
    assert seeds[:3] == [0, 1, 2] and len(set(seeds[:6])) == 6, "each turn has its own"


def test_a_response_without_room_names_the_limit(collector):
    slot = collector._Slot(SAMPLES[0], np.array([1]), np.arange(9))
    with pytest.raises(ValueError, match=r"generator\.max_response_tokens\D*8"):
        collector_of(collector, Countdown(1), StandInEngine(print))._submit(slot)


@pytest.mark.parametrize(
    ("tokens", "score", "problem"),
    [([1, 2, 4], None, "changed tokens"), ([1, 2, 3], 1.0, "ended a slot with score 1.0")],
)
def test_an_environment_that_changes_earlier_tokens_or_gives_no_score_is_an_error(
    collector, tokens, score, problem
):
    after = slot_state(tokens, done=True)
    after["score"] = NonTensorData(score)
    with pytest.raises((ValueError, TypeError), match=problem):
        collector._Slot(SAMPLES[0], np.array([1, 2]), np.array([1, 2])).extend(
            completion([3]), after
        )

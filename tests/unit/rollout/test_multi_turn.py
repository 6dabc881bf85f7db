"""The multi-turn environment: token ids, limits, rewards, and slots that run independently."""

import asyncio
import random
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lib.engine import StandInEngine, StandInPool
from lib.properties import many
from tensordict import NonTensorData, TensorDict, lazy_stack

from grpo_components.rewards.pool import Score
from grpo_components.rollout.completions import Completion
from grpo_components.rollout.multi_turn import MultiTurnEnvironment, Reply
from grpo_components.trajectory import summarize, unpack


def collector() -> Any:
    """The module of collectors, imported once `module` has set what vLLM reads."""
    from grpo_components.rollout import collector

    return collector


@pytest.fixture(scope="module")
def module(engine_variables):
    from grpo_components.rollout import generator

    return generator


class Tokenizer:
    """Letters by their code; decoding loses case, so that re-tokenizing would change the ids."""

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids).lower()


def ids(text):
    return [ord(letter) for letter in text]


def all_right(samples):
    return [Score(1.0, {"correctness": 1.0}, True, None) for _ in samples]


def make(world, *, num_slots=1, max_turns=3, max_response_tokens=30, score=all_right, encode=ids):
    env = MultiTurnEnvironment(
        num_slots=num_slots,
        decode=Tokenizer().decode,
        encode=encode,
        score=score,
        max_response_tokens=max_response_tokens,
        max_turns=max_turns,
        world=world,
    )
    env.ask([prompt(i) for i in range(num_slots)])
    return env


def prompt(number, text="Q?"):
    return {
        "prompt_index": number,
        "prompt_ids": ids(text),
        "prompt_text": text,
        "answer": "42",
        "seed": 1000 + number,
    }


class Says:
    """A policy that writes the given lines in every slot and records what it reads."""

    def __init__(self, *lines, finish_reason="stop"):
        self.lines, self.finish_reason, self.seen = lines, finish_reason, []

    def __call__(self, tensordict):
        slots = tensordict.unbind(0)
        for slot in slots:
            self.seen.append("".join(map(chr, slot["tokens"].tolist())))
            line = ids(self.lines[(len(self.seen) - 1) % len(self.lines)])
            slot.update(
                TensorDict(
                    response=torch.tensor(line, dtype=torch.int64),
                    logprobs=torch.full((len(line),), -0.5),
                    versions=torch.full((len(line),), len(self.seen), dtype=torch.int32),
                    finish_reason=NonTensorData(self.finish_reason),
                )
            )
        return lazy_stack(list(slots), 0)


def world_of(*replies):
    """A world that makes these replies in order."""

    def world(prompt, seed):
        left = list(replies)
        return lambda text: left.pop(0)

    return world


def rollout(module, env, policy):
    (slot,) = collector().GroupCollector(env, policy).rollout()
    return slot.trajectory(prompt(0), epoch=0, group_id=0, attempt=0, temperature=1.0)


# ---- token ids and replies ----------------------------------------------------------------------


def test_the_policys_ids_stay_as_sampled_and_the_worlds_ids_are_masked(module):
    policy = Says("AbC", "dE")
    record = rollout(module, make(world_of(Reply("<Go>"), Reply(done=True))), policy)
    assert record.response_ids.tolist() == ids("AbC<Go>dE")
    assert record.response_mask.tolist() == [True] * 3 + [False] * 4 + [True] * 2
    assert record.token_versions.tolist() == [1] * 3 + [-1] * 4 + [2] * 2
    assert record.generator_logprobs.tolist() == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 2
    assert policy.seen == ["Q?", "Q?AbC<Go>"], "the policy continues from its own ids"
    assert record.finish_reason == "stop" and record.oldest_version == 1


def test_the_world_reads_each_turn_and_the_rewards_judge_the_last_one(module):
    heard, judged = [], []

    def world(prompt, seed):
        def respond(text):
            heard.append(text)
            return Reply("?") if len(heard) < 3 else Reply(done=True, answer="of the third")

        return respond

    def score(samples):
        judged.extend(samples)
        return all_right(samples)

    rollout(module, make(world, score=score), Says("ONE", "TWO", "THREE"))
    assert heard == ["one", "two", "three"]
    shown = {"prompt_text": "Q?", "response_text": "three", "answer": "of the third"}
    assert judged == [shown | {"finish_reason": "stop", "seed": 1000}]


WRONG = {"text": None, "done": "no", "rewards": {"hint": float("nan")}, "answer": 42}


@pytest.mark.parametrize(("field", "value"), WRONG.items())
def test_a_reply_with_a_wrong_field_cannot_be_made(field, value):
    with pytest.raises(ValueError, match=rf"^Reply\.{field}: .* given; allowed: "):
        Reply(**{field: value})


def test_a_reply_accepts_numpy_values():
    reply = Reply(done=np.bool_(True), rewards={"hint": np.float32(0.5), "cost": -1})
    assert reply.done and sum(reply.rewards.values()) == -0.5


def test_a_world_that_returns_another_type_is_an_error(module):
    with pytest.raises(TypeError, match="Reply"):
        rollout(module, make(lambda prompt, seed: lambda text: "Go"), Says("x"))
    with pytest.raises(TypeError, match="function"):
        rollout(module, make(lambda prompt, seed: "Go"), Says("x"))


def test_a_world_that_changes_its_prompt_affects_no_other_conversation(module):
    """Siblings and repeated groups share one row of the data set."""
    seen, row = [], prompt(0) | {"board": [0]}

    def world(prompt, seed):
        seen.append(list(prompt["board"]))
        prompt["board"].append(1)
        return lambda text: Reply(done=True)

    for _ in range(2):
        env = make(world, num_slots=2)
        env.ask([{**row, "seed": seed} for seed in (1, 2)])
        collector().GroupCollector(env, Says("x")).rollout()
    assert seen == [[0]] * 4 and row["board"] == [0]


def test_after_an_empty_reply_the_policy_continues_its_own_text(module):
    policy = Says("ab")
    record = rollout(module, make(world_of(Reply(), Reply(), Reply(done=True))), policy)
    assert policy.seen == ["Q?", "Q?ab", "Q?abab"] and record.response_mask.all()


# ---- limits -------------------------------------------------------------------------------------


@settings(max_examples=many(60))
@example(turns=[(3, 2), (1, 0)], max_turns=6, max_response_tokens=5)  # no room for another token
@example(turns=[(3, 2), (1, 0)], max_turns=6, max_response_tokens=6)
@given(
    turns=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    max_turns=st.integers(1, 6),
    max_response_tokens=st.integers(1, 40),
)
def test_no_response_exceeds_a_limit_and_one_that_reaches_it_ends_with_length(
    module, turns, max_turns, max_response_tokens
):
    """Only if the world ends the conversation is the finish reason `stop`."""
    max_response_tokens = max(max_response_tokens, turns[0][0])
    said = [Reply("w" * size, done=i == len(turns) - 1) for i, (_, size) in enumerate(turns)]
    env = make(world_of(*said), max_turns=max_turns, max_response_tokens=max_response_tokens)
    begun = []

    def policy(tensordict):
        (slot,) = tensordict.unbind(0)
        left = max_response_tokens - int(slot["response_tokens"])
        assert left >= 1, "there is room for a token"
        wanted = turns[len(begun)][0]
        begun.append(min(wanted, left))
        return Says("p" * begun[-1], finish_reason="stop" if wanted <= left else "length")(
            tensordict
        )

    record = rollout(module, env, policy)
    assert len(begun) <= max_turns and len(record.response_ids) <= max_response_tokens
    assert record.response_mask[-1], "the policy reads every reply"
    ended_itself = len(begun) == len(turns) and begun[-1] == turns[-1][0]
    assert record.finish_reason == ("stop" if ended_itself else "length")


def test_a_reply_that_can_never_fit_is_not_tokenized(module):
    """Tokenizing it could exceed the time limit of the rollout."""
    env = make(world_of(Reply("w" * 10**6)), max_response_tokens=30, encode=None)
    record = rollout(module, env, Says("x"))
    assert record.finish_reason == "length" and record.response_ids.tolist() == ids("x")


def test_a_policy_without_room_names_the_limit(module):
    policy = collector().EnginePolicy(
        SimpleNamespace(submit=print), max_response_tokens=5, stop_token_ids=[], truncation={}
    )
    policy.seeds, policy.names = [1], ["a"]
    state = TensorDict(
        tokens=torch.arange(9), response_tokens=torch.tensor(5), done=torch.tensor([False])
    )
    with pytest.raises(ValueError, match=r"generator\.max_response_tokens\D*5"):
        policy(lazy_stack([state], 0))


def test_an_environment_that_changes_earlier_tokens_is_an_error(module):
    slot = collector().SlotRollout(np.array([1, 2]))
    turn = TensorDict(
        response=torch.tensor([3]),
        next=TensorDict(tokens=torch.tensor([1, 2, 4]), done=torch.tensor([True])),
    )
    with pytest.raises(ValueError, match="tokens"):
        slot.extend(turn)


# ---- rewards ------------------------------------------------------------------------------------


def test_rewards_of_turns_are_added_to_the_rewards_of_the_last_turn(module):
    world = world_of(
        Reply("a", rewards={"hint": 0.25, "cost": -0.5}),
        Reply("b", rewards={"hint": 0.25}),
        Reply(done=True, rewards={"bonus": 2.0}),
    )
    record = rollout(module, make(world), Says("x"))
    terms = {"hint": 0.5, "cost": -0.5, "bonus": 2.0, "correctness": 1.0}
    assert record.reward_terms == terms and record.success
    assert record.reward == pytest.approx(sum(terms.values()))


def test_the_rewards_of_torchrls_steps_add_up_to_the_reward_of_the_sample(module):
    env = make(world_of(Reply("a", rewards={"hint": 0.25}), Reply(done=True, rewards={"end": 2.0})))
    rewards, state = [], env.reset()
    for _ in range(2):
        state = env.step(Says("x")(state))["next"]
        rewards.append(float(state["reward"]))
    assert rewards == [0.25, 3.0] and bool(state["done"])


def test_a_failed_score_stays_failed_whatever_the_rewards_of_the_turns(module):
    failed = Score(float("nan"), {}, False, "reward correctness: ValueError")
    world = world_of(Reply(done=True, rewards={"hint": 0.5}))
    record = rollout(module, make(world, score=lambda samples: [failed]), Says("x"))
    assert record.failed and record.error == failed.error


def test_a_world_must_not_use_the_name_of_a_reward_of_the_config(module):
    env = make(world_of(Reply(done=True, rewards={"correctness": 0.5})))
    with pytest.raises(ValueError, match=r"^Reply\.rewards: 'correctness'"):
        rollout(module, env, Says("x"))


def test_several_slots_of_one_environment_end_one_by_one_and_then_stay_as_they_are(module):
    """For example if a factory hides the `slots_apart` of its class."""

    def world(prompt, seed):
        turns = iter(range(prompt["prompt_index"] + 1))
        return lambda text: Reply("-", done=next(turns) == prompt["prompt_index"])

    env, policy = make(world, num_slots=3), Says("xy")
    made = collector().GroupCollector(env, policy)
    assert not policy.seen, "torchrl would reset an environment in the constructor"
    for _ in range(2):  # a second rollout of the same collector starts afresh
        slots = made.rollout()
        said = ["".join(map(chr, slot.response_ids.tolist())) for slot in slots]
        assert said == ["xy", "xy-xy", "xy-xy-xy"]
        assert all(slot.score == all_right([0])[0] for slot in slots)


# ---- in a generator -----------------------------------------------------------------------------


@pytest.fixture
def engine():
    """Samples two letters that depend on the seed."""

    def letters(request):
        return Completion(
            token_ids=np.full(2, 65 + request.seed % 26, np.int64),
            logprobs=np.full(2, -0.5, np.float32),
            token_versions=np.full(2, 3, np.int32),
            finish_reason="stop",
        )

    return StandInEngine(letters)


@pytest.fixture
def over(make_generator, engine):
    """Builds a generator over a world."""

    def build(world):
        return make_generator(
            partial(MultiTurnEnvironment, max_turns=3, world=world),
            engine=engine,
            pool=StandInPool(all_right),
            tokenizer=Tokenizer,
            size=12,
            timeout_s=20,
            slots_apart=True,
        )

    return build


def dice(prompt, seed):
    """A world that rolls a die after each turn."""
    rolls = random.Random(seed)
    return lambda text: Reply(str(rolls.randint(1, 6)))


def generate(generator, group_id, number=0):
    return generator.generate_group(prompt(number), 0, group_id, 0, 1.0)


def test_a_repeated_group_is_identical_and_its_samples_and_turns_have_seeds_of_their_own(
    over, engine, module
):
    """A restarted generator repeats a group, with the same dice."""
    first, again, other = (
        unpack(asyncio.run(generate(over(dice), group_id))[0]) for group_id in (5, 5, 6)
    )
    assert [t.response_ids.tolist() for t in first] == [t.response_ids.tolist() for t in again]
    rolls = {tuple(t.response_ids[~t.response_mask].tolist()) for t in (*first, *other)}
    assert len(rolls) > 2
    assert all(t.finish_reason == "length" for t in first), "three turns without an end"
    for i in range(3):
        mine = [each for each in engine.requests if each.name == f"group 5 sample {i}"]
        assert [each.max_tokens for each in mine] == [12, 9, 6] * 2, "the room that is left"
        seeds = [each.seed for each in mine]
        assert seeds[0] == module.sampling_seed(42, 0, 5, i) and len(set(seeds)) == 3


def test_evaluations_of_a_prompt_always_have_the_same_seed(over):
    seeds = []

    def world(prompt, seed):
        seeds.append((prompt["prompt_index"], seed))
        return lambda text: Reply(done=True)

    generator = over(world)
    for _ in range(2):
        asyncio.run(generator.evaluate([prompt(i) for i in range(4)], 1.0))
    assert len(set(seeds)) == 4 and len(seeds) == 8


def test_a_slow_slot_delays_neither_its_siblings_nor_other_groups(over):
    """One world hangs until every other conversation has ended."""
    others, release = threading.Semaphore(0), threading.Event()
    first = threading.Lock()

    def world(prompt, seed):
        turns = iter(range(3))

        def respond(text):
            if prompt["prompt_index"] == 0 and first.acquire(blocking=False):
                for _ in range(5):  # two siblings, and three of the other group
                    assert others.acquire(timeout=15)
                release.set()
            done = next(turns) == 2
            if done:
                others.release()
            return Reply("-", done=done)

        return respond

    generator = over(world)

    async def both():
        return await asyncio.gather(generate(generator, 0), generate(generator, 1, number=1))

    groups = asyncio.run(both())
    assert release.is_set()
    for packed, summary, _ in groups:
        assert summary.errors == [] and len(set(summary.seeds)) == 3
        assert replace(summary, seeds=[]) == summarize(packed)


def test_a_world_that_fails_affects_only_its_own_sample(over):
    first = threading.Lock()

    def world(prompt, seed):
        def respond(text):
            if first.acquire(blocking=False):
                raise KeyError("inventory")
            return Reply(done=True)

        return respond

    _, summary, _ = asyncio.run(generate(over(world), group_id=1))
    assert sorted(summary.finish_reasons) == ["error", "stop", "stop"]
    (error,) = summary.errors
    assert error.startswith(f"environment: KeyError ({__file__}:")
    assert error.splitlines()[2].endswith(", in respond"), "the world's frames only"


def test_the_log_shows_the_turns(over):
    def world(prompt, seed):
        replies = iter([Reply("GO"), Reply(done=True)])
        return lambda text: next(replies)

    packed, _, text = asyncio.run(generate(over(world), group_id=1))
    for record, shown in zip(unpack(packed), text["responses"], strict=True):
        assert [turn["by"] for turn in shown["turns"]] == ["policy", "environment", "policy"]
        assert shown["turns"][1]["text"] == "go"
        assert "".join(turn["text"] for turn in shown["turns"]) == shown["response"]
        assert shown["response_tokens"] == int(record.response_mask.sum()) == 4

"""The multi-turn environment: token ids, limits, rewards, and slots that run independently."""

import asyncio
import itertools
import random
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lib import rows
from lib.engine import StandInEngine, StandInPool, completion
from lib.processes import until
from lib.properties import many

from grpo_components.rewards.pool import Score
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.multi_turn import MultiTurnEnvironment, Reply
from grpo_components.rollout.samples import Sample, sampling_seed
from grpo_components.settings import GeneratorSettings
from grpo_components.trajectory import summarize, unpack


@pytest.fixture(scope="module", autouse=True)
def turn_rollouts(engine_variables):
    """Rolls out turns; imported once what vLLM reads is set."""
    from grpo_components.rollout import turn_rollouts

    return turn_rollouts


class Tokenizer:
    """Letters by their code; decoding loses case, so that re-tokenizing would change the ids."""

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return ids(text)

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids).lower()


def ids(text):
    return [ord(letter) for letter in text]


def all_right(samples):
    return [Score(1.0, {"correctness": 1.0}, True, None) for _ in samples]


def prompt(number):
    fields = {"prompt_text": "Q?", "answer": "42", "seed": 1000 + number}
    return rows.prompt(number, ids("Q?"), **fields)


def says(*lines):
    """An engine that writes these lines in turn; turn `n` is of version `n`."""
    count = itertools.count(1)

    def line(request):
        number = next(count)
        return completion(ids(lines[(number - 1) % len(lines)])[: request.max_tokens], number)

    return StandInEngine(line)


def read(engine):
    """What the policy was shown before each turn."""
    return ["".join(map(chr, request.prompt_ids)) for request in engine.requests]


def world_of(*replies):
    """A world that makes these replies in order."""

    def world(prompt, seed):
        left = iter(replies)
        return lambda text: next(left)

    return world


@pytest.fixture(scope="module")
def rollout(turn_rollouts):
    """Rolls out one conversation with a world; gives its trajectory."""
    made = []

    def run(world, engine, *, max_turns=3, max_response_tokens=30, score=all_right, encode=ids):
        made.append(
            turn_rollouts.TurnRollouts(
                engine,
                StandInPool(score),
                GeneratorSettings(max_response_tokens=max_response_tokens, temperature=1.0),
                EnvironmentOptions(
                    build_environment=partial(MultiTurnEnvironment, max_turns, world),
                    timeout_s=20,
                    kind="multi_turn",
                ),
                decode=Tokenizer().decode,
                encode=encode,
            )
        )
        (((record,), *_),) = asyncio.run(made[-1].collect([Sample(prompt(0), "a sample", 7)]))
        return record

    yield run
    for each in made:
        each.close()


# ---- token ids and replies ----------------------------------------------------------------------


def test_the_policys_ids_stay_as_sampled_and_the_worlds_ids_are_masked(rollout):
    engine = says("AbC", "dE")
    record = rollout(world_of(Reply("<Go>"), Reply(done=True)), engine)
    assert record.response_ids.tolist() == ids("AbC<Go>dE")
    assert record.response_mask.tolist() == [True] * 3 + [False] * 4 + [True] * 2
    assert record.token_versions.tolist() == [1] * 3 + [-1] * 4 + [2] * 2
    assert record.generator_logprobs.tolist() == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 2
    assert read(engine) == ["Q?", "Q?AbC<Go>"], "the policy continues from its own ids"
    assert record.finish_reason == "stop" and record.oldest_version == 1


def test_the_world_reads_each_turn_and_the_rewards_judge_the_last_one(rollout):
    heard, judged = [], []

    def world(prompt, seed):
        def respond(text):
            heard.append(text)
            return Reply("?") if len(heard) < 3 else Reply(done=True, answer="of the third")

        return respond

    def score(samples):
        judged.extend(samples)
        return all_right(samples)

    rollout(world, says("ONE", "TWO", "THREE"), score=score)
    assert heard == ["one", "two", "three"]
    shown = {"prompt_text": "Q?", "response_text": "three", "answer": "of the third"}
    assert judged == [shown | {"finish_reason": "stop", "seed": 1000}]


def test_a_worlds_rewards_may_be_numbers_of_numpy_and_one_that_is_not_finite_fails_its_sample(
    rollout,
):
    numbers = Reply(done=np.bool_(True), rewards={"hint": np.float32(0.5), "cost": -1})
    record = rollout(world_of(numbers), says("x"))
    assert {"hint": 0.5, "cost": -1.0}.items() <= record.reward_terms.items()
    record = rollout(world_of(Reply(done=True, rewards={"hint": float("nan")})), says("x"))
    assert record.failed and "reward nan" in record.error


@pytest.mark.parametrize("world", [lambda prompt, seed: lambda text: "Go", lambda *_: "Go"])
def test_a_world_that_returns_another_type_fails_its_sample(rollout, world):
    record = rollout(world, says("x"))
    allowed = "a function" if isinstance(world({}, 1), str) else "a Reply"
    assert record.failed and "TypeError" in record.error and f"allowed: {allowed}" in record.error


def test_after_an_empty_reply_the_policy_continues_its_own_text(rollout):
    engine = says("ab")
    record = rollout(world_of(Reply(), Reply(), Reply(done=True)), engine)
    assert read(engine) == ["Q?", "Q?ab", "Q?abab"] and record.response_mask.all()


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
    rollout, turns, max_turns, max_response_tokens
):
    """Only if the world ends the conversation is the finish reason `stop`."""
    max_response_tokens = max(max_response_tokens, turns[0][0])
    said = [Reply("w" * size, done=i == len(turns) - 1) for i, (_, size) in enumerate(turns)]
    begun = []

    def policy(request):
        assert request.max_tokens >= 1, "there is room for a token"
        wanted = turns[len(begun)][0]
        begun.append(size := min(wanted, request.max_tokens))
        return completion(ids("p" * size), finish_reason="stop" if size == wanted else "length")

    limits = {"max_turns": max_turns, "max_response_tokens": max_response_tokens}
    record = rollout(world_of(*said), StandInEngine(policy), **limits)
    assert len(begun) <= max_turns and len(record.response_ids) <= max_response_tokens
    assert record.response_mask[-1], "the policy reads every reply"
    ended_itself = len(begun) == len(turns) and begun[-1] == turns[-1][0]
    assert record.finish_reason == ("stop" if ended_itself else "length")


def test_a_reply_that_can_never_fit_is_not_tokenized(rollout):
    """Tokenizing it could exceed the time limit of the rollout."""
    record = rollout(world_of(Reply("w" * 10**6)), says("x"), encode=None)
    assert record.finish_reason == "length" and record.response_ids.tolist() == ids("x")


# ---- rewards ------------------------------------------------------------------------------------


def test_rewards_of_turns_are_added_to_the_rewards_of_the_last_turn(rollout):
    world = world_of(
        Reply("a", rewards={"hint": 0.25, "cost": -0.5}),
        Reply("b", rewards={"hint": 0.25}),
        Reply(done=True, rewards={"bonus": 2.0}),
    )
    record = rollout(world, says("x"))
    terms = {"hint": 0.5, "cost": -0.5, "bonus": 2.0, "correctness": 1.0}
    assert record.reward_terms == terms and record.success
    assert record.reward == pytest.approx(sum(terms.values()))


def test_a_failed_score_stays_failed_whatever_the_rewards_of_the_turns(rollout):
    failed = Score(float("nan"), {}, False, "reward correctness: ValueError")
    world = world_of(Reply(done=True, rewards={"hint": 0.5}))
    record = rollout(world, says("x"), score=lambda samples: [failed])
    assert record.failed and record.error == f"{failed.error}\nresponse: 'x'"


def test_a_world_must_not_use_the_name_of_a_reward_of_the_config(rollout):
    record = rollout(world_of(Reply(done=True, rewards={"correctness": 0.5})), says("x"))
    assert record.failed and "Reply.rewards: 'correctness'" in record.error


# ---- in a generator -----------------------------------------------------------------------------


@pytest.fixture
def engine():
    """Samples two letters that depend on the seed."""
    return StandInEngine(lambda request: completion([65 + request.seed % 26] * 2, 3))


@pytest.fixture
def over(make_generator, engine):
    """Builds a generator over a world."""

    def build(world, timeout_s=20):
        return make_generator(
            partial(MultiTurnEnvironment, 3, world),
            engine=engine,
            pool=StandInPool(all_right),
            tokenizer=Tokenizer,
            size=12,
            timeout_s=timeout_s,
            kind="multi_turn",
        )

    return build


def dice(prompt, seed):
    """A world that rolls a die after each turn."""
    rolls = random.Random(seed)
    return lambda text: Reply(str(rolls.randint(1, 6)))


def generate(generator, group_id, number=0, **fields):
    return generator.generate_group(prompt(number) | fields, 0, group_id, 0, 1.0)


def test_a_repeated_group_is_identical_and_its_samples_and_turns_have_seeds_of_their_own(
    over, engine
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
        assert seeds[0] == sampling_seed(42, 0, 5, i) and len(set(seeds)) == 3


def test_evaluations_of_a_prompt_always_have_the_same_seed(over):
    seeds = []

    def world(prompt, seed):
        seeds.append((prompt["prompt_index"], seed))
        return lambda text: Reply(done=True)

    generator = over(world)
    for _ in range(2):
        asyncio.run(generator.evaluate([prompt(i) for i in range(4)], 1.0))
    assert len(set(seeds)) == 4 and len(seeds) == 8


@pytest.mark.anyio
async def test_a_slow_slot_delays_neither_its_siblings_nor_other_groups(over):
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
            if done := next(turns) == 2:
                others.release()
            return Reply("-", done=done)

        return respond

    generator = over(world)
    groups = await asyncio.gather(generate(generator, 0), generate(generator, 1, number=1))
    assert release.is_set()
    for packed, summary, _ in groups:
        assert summary.errors == [] and len(set(summary.seeds)) == 3
        assert replace(summary, seeds=[]) == summarize(packed)


def test_a_world_that_changes_its_prompt_affects_no_other_conversation(over):
    """Siblings and repeated groups share one row of the data set."""
    seen, board = [], [0]

    def world(prompt, seed):
        seen.append(list(prompt["board"]))
        prompt["board"].append(1)
        return lambda text: Reply(done=True)

    generator = over(world)
    for group_id in range(2):
        asyncio.run(generate(generator, group_id, board=board))
    assert seen == [[0]] * 6 and board == [0]


def test_no_thread_is_used_while_the_policy_samples_and_a_thread_that_hangs_is_left(over, engine):
    """Threads are used again; a call that misses the limit fails its own sample alone."""
    before, most, release = threading.active_count(), [], threading.Event()
    hangs, first = threading.Lock(), threading.Lock()

    def arrived(request):
        most.append(threading.active_count() - before)
        request.finish()

    def world(prompt, seed):
        def respond(text):
            if hangs.locked() and first.acquire(blocking=False):
                release.wait(30)
            return Reply("-")

        return respond

    generator, engine.arrived = over(world, timeout_s=3.0), arrived
    for group_id in range(20):
        asyncio.run(generate(generator, group_id))
    assert len(most) == 180 and max(most) <= 3, "as many as samples at a time"
    with hangs:
        _, summary, _ = asyncio.run(generate(generator, 20))
    assert sorted(summary.finish_reasons) == ["error", "length", "length"]
    (error,) = summary.errors
    assert error.startswith(f"environment: TimeoutError ({__file__}:")
    assert "did not end its take_turn within 3 s" in error and "release.wait(30)" in error
    release.set()
    generator.close()
    assert until(lambda: threading.active_count() <= before + 1), "the reader of the pool at most"


@pytest.mark.parametrize("raised", [KeyError("inventory"), StopIteration(), SystemExit(3)])
def test_a_world_that_fails_affects_only_its_own_sample(over, raised):
    first = threading.Lock()

    def world(prompt, seed):
        def respond(text):
            if first.acquire(blocking=False):
                raise raised
            return Reply(done=True)

        return respond

    _, summary, _ = asyncio.run(generate(over(world), group_id=1))
    assert sorted(summary.finish_reasons) == ["error", "stop", "stop"]
    (error,) = summary.errors
    named = "KeyError" if isinstance(raised, KeyError) else "RuntimeError"
    assert error.startswith(f"environment: {named} ({__file__}:")
    assert error.splitlines()[2].endswith(", in respond"), "the world's frames only"


def test_the_log_shows_the_turns(over):
    world = world_of(Reply("GO"), Reply(done=True))
    packed, _, text = asyncio.run(generate(over(world), group_id=1))
    for record, shown in zip(unpack(packed), text["responses"], strict=True):
        assert [turn["by"] for turn in shown["turns"]] == ["policy", "environment", "policy"]
        assert shown["turns"][1]["text"] == "go"
        assert "".join(turn["text"] for turn in shown["turns"]) == shown["response"]
        assert shown["response_tokens"] == int(record.response_mask.sum()) == 4

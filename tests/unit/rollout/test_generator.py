"""A generator's groups: whole, in order, every token with its origin; without a real engine."""

import asyncio
import math
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from inspect import isfunction, signature
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.engine import StandInEngine, StandInPool, completion
from lib.rows import prompt
from tensordict import NonTensorData, lazy_stack

from grpo_components.exchange.weight_deltas import NO_BASE, DeltaEncoder
from grpo_components.exchange.weight_probe import ProbeReading
from grpo_components.exchange.weights import pack_bucket, snapshot_checksum
from grpo_components.rewards.pool import Score
from grpo_components.rollout.engine import Engine
from grpo_components.rollout.engine_use import NO_REWARD
from grpo_components.rollout.environments import SingleTurnEnvironment
from grpo_components.rollout.multi_turn import MultiTurnEnvironment, Reply
from grpo_components.trajectory import summarize, unpack

STOP = 0


@pytest.fixture(scope="module")
def module(engine_variables):
    from grpo_components.rollout import generator

    return generator


def answer_to(prompt_ids, seed):
    """An engine's answer that tells prompts, seeds and lengths apart."""
    size, reason = 1 + seed % 4, "stop" if seed % 2 else "length"
    said = completion([100 + sum(prompt_ids) % 100] * size, seed % 7, finish_reason=reason)
    return replace(said, logprobs=-np.arange(1, size + 1, dtype=np.float32))


def scores(samples):
    """One for a response that was finished."""
    finished = [sample["finish_reason"] == "stop" for sample in samples]
    return [Score(float(each), {"finished": float(each)}, each, None) for each in finished]


def test_seeds_are_the_same_in_every_process_and_release(module):
    """Written down: another formula would make another run of the same config."""
    assert module.sampling_seed(42, 0, 7, 3) == 2190725600997302520


# ---- the whole generator over a stand-in of its engine ------------------------------------------


def test_the_stand_in_has_the_methods_of_the_engine(module):
    def interface(engine):
        return {
            name: [(p.name, p.kind, p.default) for p in signature(method).parameters.values()]
            for name, method in vars(engine).items()
            if isfunction(method) and not name.startswith("_")
        }

    assert interface(StandInEngine) == interface(Engine)


class Tokenizer:
    """Knows ids up to 200; like torchtune's, it fails on any other in one of two ways."""

    def decode(self, token_ids):
        for token_id in token_ids:
            if token_id > 200:
                raise (KeyError if token_id % 2 else TypeError)(token_id)
        return "".join(f"<{token_id}>" for token_id in token_ids)


@pytest.fixture
def engine():
    engine = StandInEngine(lambda request: answer_to(request.prompt_ids, request.seed))
    engine.shapes = {"query": (3,), "value": (3,)}
    engine.probe, engine.left = ProbeReading([-1.0], label=5, cached_tokens=0), 2
    return engine


@pytest.fixture
def make(make_generator, engine):
    """Builds a generator over an environment."""
    return partial(make_generator, engine=engine, pool=StandInPool(scores), tokenizer=Tokenizer)


@pytest.fixture
def single(make):
    """Builds a generator over the shipped environment."""
    return partial(make, None, kind="single_turn")


@pytest.fixture
def generator(single):
    return single()


def group(generator, number=4, group_id=17, **fields):
    row = prompt(number, [number], **fields)
    return asyncio.run(generator.generate_group(row, 1, group_id, 5, 0.9))


def load(generator, version, *buckets):
    return asyncio.run(generator.load_weights(version, *buckets))


def test_a_group_answers_one_prompt_group_size_times_and_its_summary_agrees(
    generator, engine, module
):
    """Its seeds depend on nothing but its number, whatever ran before."""
    group(generator, number=0, group_id=0)
    engine.requests.clear()
    packed, summary, text = group(generator, number=4, group_id=17)
    records, seeds = unpack(packed), [module.sampling_seed(42, 0, 17, i) for i in range(3)]
    for i, (t, request, seed) in enumerate(zip(records, engine.requests, seeds, strict=True)):
        assert request.name == f"group 17 sample {i}"
        assert t.prompt_ids.tolist() == [4] and t.prompt_index == 4
        assert (t.group_id, t.epoch, t.attempt, t.temperature) == (17, 1, 5, 0.9)
        assert (request.max_tokens, request.temperature, request.seed) == (8, 0.9, seed)
        assert (request.stop_token_ids, request.truncation["top_k"]) == ([STOP], 7)
        expected = answer_to([4], seed)
        assert t.response_ids.tolist() == expected.token_ids.tolist() and t.response_mask.all()
        assert t.generator_logprobs.tolist() == expected.logprobs.tolist()
        assert t.token_versions.tolist() == expected.token_versions.tolist()
        assert t.finish_reason == expected.finish_reason
    assert len(set(summary.seeds)) == 3
    assert summary == replace(summarize(packed), seeds=summary.seeds)
    assert (text["prompt"], text["answer"], text["epoch"]) == ("question 4", "answer 4", 1)
    assert [r["response_tokens"] for r in text["responses"]] == summary.response_tokens
    assert [r["reward"] for r in text["responses"]] == summary.rewards


def test_a_response_is_scored_while_others_of_its_group_are_sampled(single, engine):
    pool, order = StandInPool(scores), []
    generator, begin = single(pool=pool), pool.begin

    def sample(number):
        order.append(f"sampled {number}")
        engine.requests[number].finish()

    def begun(each):
        order.append("scoring began")
        if len(pool.begun) < 2:
            sample(len(pool.begun))
        return begin(each)

    engine.arrived = lambda request: sample(2) if len(engine.requests) == 3 else None
    pool.begin = begun
    packed, *_ = group(generator)
    began = "scoring began"
    assert order == ["sampled 2", began, "sampled 0", began, "sampled 1", began]
    sampled = [request.answer.token_ids.tolist() for request in engine.requests]
    assert [t.response_ids.tolist() for t in unpack(packed)] == sampled, "each in its own slot"


@pytest.mark.anyio
async def test_a_group_starts_while_the_longest_response_of_another_is_sampled(generator, engine):
    requests, engine.arrived = engine.requests, lambda request: None

    async def sampled(*numbers):
        while len(requests) <= max(numbers):
            await asyncio.sleep(0.001)
        for number in numbers:
            requests[number].finish()

    assert await generator.reserve(5) == 2
    groups = [generator.generate_group(prompt(i), 0, i, 0, 1.0) for i in (0, 1)]
    groups = [asyncio.create_task(each) for each in groups]
    await sampled(0, 1)  # of the first group
    assert await generator.reserve(0.01) == 0, "only two responses have room"
    await sampled(5)  # of the second
    assert await generator.reserve(5) == 1
    assert not any(group.done() for group in groups)
    await sampled(2, 3, 4)
    await asyncio.gather(*groups)
    assert await generator.reserve(5) == 1, "the other is reserved already"


def test_an_engine_without_sequences_waits_for_rewards_or_for_a_group(single):
    def begin(sample):
        scoring = Future()
        threading.Timer(0.02, lambda: scoring.set_result(scores([sample])[0])).start()
        return scoring

    pool = StandInPool(scores)
    pool.begin = begin
    generator = single(pool=pool)
    began = time.perf_counter()
    group(generator)
    use = generator.time_use()
    assert use["seconds"][NO_REWARD] >= 0.02
    assert sum(use["seconds"].values()) >= time.perf_counter() - began - 0.01
    assert use["cpu_seconds"].keys() == use["seconds"].keys()
    assert (use["sequence_share"], use["engine_steps"]) == (0, {})


@pytest.mark.parametrize("samples", [1, 3])
def test_an_evaluation_answers_each_prompt_in_order_with_seeds_that_never_change(
    generator, engine, module, samples
):
    """The last chunk is smaller than a group; the first sample has the seed of an only one."""
    seeds = {
        (i, k): module.sampling_seed(42, 1, i, *([k] if k else []))
        for i in range(7)
        for k in range(samples)
    }
    expected = [answer_to([i + 1], seed) for (i, _), seed in seeds.items()]
    prompts = [prompt(i, [i + 1]) for i in range(7)]
    for _ in range(2):
        results = asyncio.run(generator.evaluate(prompts, 0.0, samples))
        assert [r["prompt_index"] for r in results] == [i for i, _ in seeds]
        assert [r["success"] for r in results] == [c.finish_reason == "stop" for c in expected]
        assert [r["oldest_version"] for r in results] == [c.token_versions[0] for c in expected]
        assert all(r["oldest_version"] == r["newest_version"] for r in results)
    asked = sorted((r.prompt_ids, r.seed, r.name, r.temperature) for r in engine.requests)
    names = {(i, k): f"evaluation of prompt {i}" + (f" sample {k}" if k else "") for i, k in seeds}
    each = [([i + 1], seed, names[i, k], 0.0) for (i, k), seed in seeds.items()]
    assert asked == sorted(each * 2)


def test_an_evaluation_returns_the_text_of_the_logged_prompts_alone(generator):
    prompts = [prompt(i, [i + 1]) for i in range(3)]
    results = asyncio.run(generator.evaluate(prompts, 1.0, 2, [0, 2]))
    assert [r["prompt_index"] for r in results if "readable" in r] == [0, 0, 2, 2]
    for result in results[:2]:
        readable = result["readable"]
        assert result["answer"] == "answer 0" and isinstance(readable["response"], str)
        assert readable["reward_terms"] == {"finished": result["reward"]}
        assert readable["versions"] == [result["oldest_version"], result["newest_version"]]
        assert all(readable[name] == result[name] for name in ("reward", "success", "error"))


def one_turn():
    return MultiTurnEnvironment(1, lambda prompt, seed: lambda text: Reply(done=True))


@pytest.mark.parametrize(
    ("kind", "environment", "most_sampled"),
    [("single_turn", None, 20), ("multi_turn", one_turn, 6), ("torchrl", SingleTurnEnvironment, 6)],
)
@pytest.mark.anyio
async def test_an_evaluation_has_no_more_responses_under_way_than_training(
    make, engine, kind, environment, most_sampled
):
    """Else they would wait in line until their time is over; only the engine may have more room."""
    pool, sampled, scored = StandInPool(scores), [0], [0]
    waiting, asked = [], engine.requests
    pool.begin = lambda sample: waiting.append(Future()) or waiting[-1]
    engine.arrived = lambda request: None
    generator = make(environment, kind=kind, pool=pool)
    evaluation = asyncio.create_task(generator.evaluate([prompt(i) for i in range(20)], 1.0))
    while not evaluation.done():
        await asyncio.sleep(0.005)
        sampling = [request for request in asked if not request.future.done()]
        sampled.append(len(sampling))
        scored.append(len(waiting))
        if sampling and most_sampled in sampled:  # threads of environments may begin late
            sampling[0].finish()
        elif waiting and not sampling:
            waiting.pop(0).set_result(scores([{"finish_reason": "stop"}])[0])
    assert (max(sampled), max(scored)) == (most_sampled, 6 if kind != "torchrl" else 0)
    assert [result["prompt_index"] for result in await evaluation] == list(range(20))
    if kind == "single_turn":  # threads of environments begin in any order
        names = [f"evaluation of prompt {i}" for i in range(20)]
        assert [request.name for request in asked] == names


def bucket_of(*names, value=1.0):
    return pack_bucket([(name, torch.full((3,), value)) for name in names])


def flipped(raw):
    raw = raw.copy()
    raw[5] ^= 1
    return raw


QUERY, VALUE = bucket_of("query"), bucket_of("value")
BOTH, RAW = bucket_of("query", "value")
TWOS = bucket_of("value", value=2.0)
RENAMED = tuple(replace(a, name=b.name) for a, b in zip(BOTH, BOTH[::-1], strict=True))
DAMAGED = {
    "corrupted": ([(BOTH, flipped(RAW))], "query"),
    "truncated": ([(BOTH, RAW[:-1])], "value"),
    "empty": ([(BOTH, RAW[:0])], "query"),
    "names exchanged": ([(RENAMED, RAW)], "value"),
    "manifests exchanged": ([(QUERY[0], TWOS[1]), (TWOS[0], QUERY[1])], "query"),
    "a bucket lost": ([QUERY], "value"),
    "a tensor lost": ([QUERY, bucket_of()], "value"),
    "none came": ([], "query"),
    "a bucket twice": ([QUERY, VALUE, QUERY], "query"),
    "another rank's": ([QUERY, bucket_of("value", "extra")], "extra"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_are_refused_before_the_engine_sees_any(generator, engine, damage):
    """The error names the tensor. The loaded weights stay; the next complete ones are loaded."""
    whole = [bucket_of(name, value=0.5) for name in ("query", "value")]
    load(generator, 4, *whole)
    buckets, tensor = DAMAGED[damage]
    with pytest.raises(ValueError, match=rf"\b{tensor}\b"):
        load(generator, 5, *buckets)
    assert generator.version == 4
    [(version, tensors)] = engine.loaded
    assert version == 4 and all((tensor == 0.5).all() for tensor in tensors.values())
    load(generator, 5, *reversed(whole))  # the order of ranks is none
    assert generator.version == 5


@pytest.mark.anyio
@pytest.mark.parametrize("at_once", [False, True])
async def test_older_weights_that_come_after_newer_ones_are_refused(
    generator, engine, monkeypatch, at_once
):
    newer_is_there = asyncio.Event()

    async def in_thread(function, *given):
        if given and given[0][0][0] == "delayed":
            await newer_is_there.wait()
            return function(given[0][1:])
        return function(*given)

    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match=r"\b5\b.*\b6\b"),
    ):
        if at_once:
            patched.setattr(asyncio, "to_thread", in_thread)
            delayed = generator.load_weights(5, ("delayed", None), QUERY, VALUE)
            older = asyncio.create_task(delayed)
            await asyncio.sleep(0)
            await generator.load_weights(6, QUERY, VALUE)
            newer_is_there.set()
            await older
        else:
            await generator.load_weights(6, QUERY, VALUE)
            await generator.load_weights(5, QUERY, VALUE)
    assert generator.version == 6
    assert [version for version, _ in engine.loaded] == [6]
    generator.begin_attempt()  # the run goes back to a checkpoint
    await generator.load_weights(5, QUERY, VALUE)
    assert generator.version == 5


def delta_pushes(versions):
    """Pushes of two ranks, of tensors that are full of their version; the first one is whole."""
    encoders, base, pushes = (DeltaEncoder(), DeltaEncoder()), NO_BASE, {}
    for version in versions:
        buckets = [bucket_of(name, value=float(version)) for name in ("query", "value")]
        ranks = zip(encoders, buckets, strict=True)
        pushes[version] = [encoder.encode(version, bucket, base) for encoder, bucket in ranks]
        base = version
    return pushes


def test_a_wrong_delta_is_refused_before_the_engine_sees_it_and_a_whole_push_mends_it(
    generator, engine
):
    pushes = delta_pushes([1, 2, 3])
    load(generator, 1, *pushes[1])
    damaged = pushes[2][1].packed.copy()
    damaged[-1] ^= 1
    wrong = {
        "query: the push of version 3 builds on": pushes[3],
        "value of version 2 did not come": [*pushes[1], pushes[2][0]],
        "value is damaged": [*pushes[1], pushes[2][0], replace(pushes[2][1], packed=damaged)],
    }
    for message, buckets in wrong.items():
        with pytest.raises(ValueError, match=f"weight tensor {message}"):
            load(generator, max(push.version for push in buckets), *buckets)
        assert generator.version == 1 and len(engine.loaded) == 1
    load(generator, 3, *pushes[1], *pushes[2], *pushes[3])
    generator.begin_attempt()
    with pytest.raises(ValueError, match="builds on bytes that are not here"):
        load(generator, 3, *pushes[3])


@pytest.mark.anyio
async def test_bytes_that_the_engine_still_loads_are_not_changed(generator, engine):
    """In a replay, pulls may overlap: the second one has the base that the driver knew of."""
    pushes, loading, seen = delta_pushes([1, 2, 3]), Future(), []
    await generator.load_weights(1, *pushes[1])
    engine.load_weights = lambda *given: seen.append(given) or loading
    second = asyncio.create_task(generator.load_weights(2, *pushes[2]))
    third = asyncio.create_task(generator.load_weights(3, *pushes[2], *pushes[3]))
    while not seen:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert [(v, [float(t[0]) for t in given.values()]) for v, given in seen] == [(2, [2, 2])]
    loading.set_result(None)
    assert [version for version, *_ in await asyncio.gather(second, third)] == [2, 3]
    assert seen[-1][0] == 3 and all((t == 3).all() for t in seen[-1][1].values())


def test_a_load_that_a_rolled_back_attempt_began_does_not_wake_the_engine(
    generator, engine, monkeypatch
):
    async def unpack(function, given):
        assert await generator.sleep() == 2
        return function(given)

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="fell asleep"):
        patched.setattr(asyncio, "to_thread", unpack)
        load(generator, 5, QUERY, VALUE)
    assert engine.loaded == ["asleep"]
    load(generator, 5, QUERY, VALUE)
    load(generator, 5, QUERY, VALUE)  # the same weights, after a skipped step
    assert [version for version, _ in engine.loaded[1:]] == [5, 5]


def test_weights_that_arrive_through_an_engine_are_acknowledged_as_those_of_the_object_store(
    generator, engine
):
    """The driver's calls come in any order; what fails the weights fails both."""
    manifests = [QUERY[0], VALUE[0]]

    async def transfer(version, number, *manifests, awaited_first=True):
        receive = partial(generator.receive_weights, version, number, {}, *manifests)
        calls = [partial(generator.weights_awaited, number), receive]
        order = calls if awaited_first else calls[::-1]
        tasks = {call: asyncio.ensure_future(call()) for call in order}
        return await asyncio.gather(*(tasks[call] for call in calls), return_exceptions=True)

    for number, first in enumerate((True, False)):
        answers = asyncio.run(transfer(5, number, *manifests, awaited_first=first))
        assert answers[0] is None and answers[1][:2] == (5, snapshot_checksum(manifests))
    assert generator.version == 5
    for wrong, facts in (manifests[:1], "missing tensor value"), (manifests * 2, "query appears"):
        failures = asyncio.run(transfer(6, 2 + len(wrong), *wrong))
        assert all(re.search(facts, str(failure)) for failure in failures)
    engine.load_weights = lambda *_: dead
    dead = Future()
    dead.set_exception(RuntimeError("the vLLM engine stopped"))
    failures = asyncio.run(transfer(5, 10, *manifests))
    assert all("engine stopped" in str(failure) for failure in failures)
    failures = asyncio.run(transfer(4, 11, *manifests))
    assert all(re.search(r"\b4\b.*\b5\b", str(failure)) for failure in failures)
    assert generator.version == 5 and len(engine.loaded) == 2


def test_a_transfer_ends_before_the_next_attempt_or_the_generator_is_restarted(
    generator, engine, module, monkeypatch
):
    manifests = [QUERY[0], VALUE[0]]
    asyncio.run(generator.receive_weights(5, 0, {}, *manifests))
    generator.begin_attempt()
    monkeypatch.setattr(module, "_END_S", 0.05)
    stuck = Future()
    engine.load_weights = lambda version, weights: stuck

    async def hang():
        receiving = asyncio.ensure_future(generator.receive_weights(6, 1, {}, *manifests))
        await asyncio.sleep(0)
        receiving.cancel()

    asyncio.run(hang())
    with pytest.raises(RuntimeError, match="still waits for weights"):
        generator.begin_attempt()


# ---- environments that fail ---------------------------------------------------------------------


class Breaks(SingleTurnEnvironment):
    """Fails in the way that the prompt's text says, once each environment's life."""

    made: ClassVar[list["Breaks"]] = []
    released = threading.Event()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.closed = threading.Event()
        self.made.append(self)

    def _reset(self, tensordict=None, **kwargs):
        how = self._prompts[-1]["prompt_text"]
        if how == "raises in reset":
            raise RuntimeError("no such level")
        if how == "hangs":
            self.released.wait(30)
        after = super()._reset(tensordict, **kwargs)
        if how == "forgets a key":
            after = lazy_stack([slot.exclude("tokens") for slot in after.unbind(0)], 0)
        return after

    def _step(self, tensordict):
        how = self._prompts[-1]["prompt_text"]
        if how == "raises in step":
            raise KeyError("inventory")
        if how == "exits":
            raise SystemExit(3)
        after = super()._step(tensordict)
        for slot in after.unbind(0)[1:]:  # of the other samples
            if how == "gives no score":
                slot["score"] = NonTensorData(None)
            if how == "gives nan":
                slot["score"] = NonTensorData(Score(math.nan, {}, True, None))
        return after

    def close(self, **kwargs):
        super().close(**kwargs)
        self.closed.set()


@pytest.fixture
def breaking(make):
    Breaks.made.clear()
    Breaks.released.clear()
    yield make(Breaks, timeout_s=0.5, in_flight=1)
    Breaks.released.set()


FAILURES = {
    "raises in reset": ("RuntimeError", "no such level"),
    "raises in step": ("KeyError", "inventory"),
    "exits": ("SystemExit", "3"),
    "hangs": ("TimeoutError", "reset", "0.5 s"),
    "forgets a key": ("KeyError", "tokens"),
    "gives no score": ("TypeError", "None"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_group_whose_environment_fails_is_failed_samples_and_the_next_has_another(breaking, how):
    packed, summary, text = group(breaking, prompt_text=how)
    for record, error in zip(unpack(packed), summary.errors, strict=True):
        assert record.finish_reason == "error" and record.error == error
        assert math.isnan(record.reward) and not record.success
        assert error.startswith("environment: ") and all(fact in error for fact in FAILURES[how])
        assert not record.response_mask.any(), "nothing to train on"
    assert summary.response_tokens == [0, 0, 0] and summary.oldest_version == -1
    assert [(r["response"], r["versions"]) for r in text["responses"]] == [("", None)] * 3
    _, summary, _ = group(breaking)
    assert summary.errors == [] and len(Breaks.made) == 2
    Breaks.released.set()
    assert Breaks.made[0].closed.wait(10), "what was left behind is closed"


def test_environments_are_made_as_many_as_are_needed_at_once_and_closed_in_the_end(make):
    Breaks.made.clear()
    generator = make(Breaks, in_flight=3)

    async def rollouts():
        for _ in range(6):
            await generator.evaluate([prompt(i) for i in range(7)], 1.0)
            await asyncio.gather(*(generator.generate_group(prompt(4), 0, 3, 0, 1) for _ in "abc"))

    threads = threading.active_count()
    asyncio.run(rollouts())
    slots = sorted(env.batch_size[0] for env in Breaks.made)
    assert slots[0] == 1 and len(slots) <= 4 and set(slots[1:]) == {3}, "the last chunk has one"
    assert threading.active_count() <= threads + len(slots), "one for each environment"
    generator.close()
    assert all(env.closed.is_set() for env in Breaks.made)


def test_a_sample_without_a_number_for_a_reward_fails_alone(breaking):
    _, summary, _ = group(breaking, prompt_text="gives nan")
    assert summary.finish_reasons[1:] == ["error", "error"] and len(Breaks.made) == 1
    assert summary.finish_reasons[0] != "error" and math.isfinite(summary.rewards[0])
    assert len(summary.errors) == 2 and all("nan" in error for error in summary.errors)


def test_an_evaluation_tells_which_prompts_failed_and_scores_the_others(breaking):
    prompts = [prompt(i) for i in range(3)]
    prompts += [prompt(i, prompt_text="raises in step") for i in (3, 4)]
    results = asyncio.run(breaking.evaluate(prompts, 1.0, 1, [3]))
    assert [result["error"] is None for result in results] == [True] * 3 + [False] * 2
    assert [result["prompt_index"] for result in results] == list(range(5))
    assert results[4]["prompt_text"] == "raises in step"
    assert results[4]["oldest_version"] is None
    assert results[3]["readable"]["response"] == ""
    assert results[3]["readable"]["error"] == results[3]["error"]


@pytest.mark.parametrize("how", ["raises in step", "hangs"])
def test_an_environments_error_shows_its_own_file_and_line_and_begins_there(breaking, how, caplog):
    packed, *_ = group(breaking, prompt_text=how)
    line, *lines = unpack(packed)[0].error.splitlines()
    assert f"({__file__}:" in line
    frames = [text for text in lines if text.startswith("  File ")]
    assert frames[0].startswith(f'  File "{__file__}", line ')
    ours = ("generator.py", "collector.py")
    assert not any(f"grpo_components/rollout/{name}" in each for name in ours for each in frames)
    logged = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert sum(line in text and frames[0] in text for text in logged) == 3


@pytest.mark.parametrize("environment", [None, SingleTurnEnvironment])
def test_a_slow_queue_of_rewards_is_not_the_environments_fault(make, environment):
    released = threading.Event()

    def slow(samples):
        released.wait(30)
        return scores(samples)

    pool = StandInPool(slow)
    pool.begin = lambda sample: Future()
    kind = "torchrl" if environment else "single_turn"
    _, summary, _ = group(make(environment, pool=pool, kind=kind, timeout_s=0.5, in_flight=1))
    released.set()
    assert len(summary.errors) == 3
    assert all(error.startswith("rewards: ") and "no score" in error for error in summary.errors)


def test_a_prompt_that_the_engine_refuses_fails_and_no_other(generator, engine):
    def refuse(request):
        if request.prompt_ids == [7]:
            request.future.set_exception(ValueError("too long"))
        else:
            request.finish()

    engine.arrived = refuse
    results = asyncio.run(generator.evaluate([prompt(i, [i]) for i in (6, 7)], 1.0))
    assert results[0]["error"] is None
    assert "ValueError" in results[1]["error"] and "too long" in results[1]["error"]


@pytest.mark.parametrize("error", ["EngineStoppedError", "RewardPoolError", "ConfigError"])
@pytest.mark.parametrize("kind", ["breaking", "generator"])
def test_a_failure_that_is_no_environments_is_the_generators(request, engine, error, kind):
    """Without an engine, or without rewards, there is nothing to go on with."""
    from grpo_components.rollout import turn_rollouts

    def fails(_):
        raise getattr(turn_rollouts, error)("rewards", "gone", "one")

    engine.arrived = fails
    with pytest.raises(getattr(turn_rollouts, error)):
        group(request.getfixturevalue(kind))


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([1, 2], "<1><2>"),
        ([1, 2, STOP], "<1><2>"),
        ([STOP], ""),
        ([1, STOP, 2], "<1><0><2>"),
        ([1, 301, 2], "<1>\ufffd<2>"),
        ([300, 301, STOP], "\ufffd\ufffd"),
    ],
)
def test_a_response_reads_without_its_stop_token_and_ids_that_are_no_text_do_no_harm(
    generator, engine, token_ids, text
):
    engine.answer = lambda request: completion(token_ids)
    *_, readable = group(generator)
    assert [response["response"] for response in readable["responses"]] == [text] * 3


# ---- texts of tokens, and memory -----------------------------------------------------------------


def decode_bytes(token_ids):
    return bytes(token_ids).decode("utf-8", errors="replace")


def decode_words(token_ids):
    """Like SentencePiece: words begin with a space, which the first word of a text loses."""
    return "".join(" abc"[token_id] for token_id in token_ids).removeprefix(" ")


@given(st.text() | st.binary(max_size=30))
def test_each_token_has_a_text_and_no_character_is_split(module, said):
    """Also where the bytes are no UTF-8."""
    token_ids = list(said.encode() if isinstance(said, str) else said)
    texts = module.token_texts(token_ids, decode_bytes)
    assert len(texts) == len(token_ids) and bool("".join(texts)) == bool(token_ids)
    if isinstance(said, str):
        assert [piece for piece in texts if piece] == list(said)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_token_keeps_its_leading_space(module, token_ids):
    assert "".join(module.token_texts(token_ids, decode_words)) == decode_words(token_ids)


def test_freed_memory_below_what_is_in_use_is_given_back(module):
    blocks = [bytes(60_000) for _ in range(4000)]  # small enough for malloc's heap
    kept = blocks[::100]  # what lies above a freed block keeps glibc from giving it back
    del blocks
    before = psutil.Process().memory_info().rss
    module.give_back_freed()  # where glibc would keep it
    given_back = before - psutil.Process().memory_info().rss
    assert len(kept) == 40 and given_back > 100 * 2**20

"""Real vLLM: new weights are those of a fresh engine, and every token has its version."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lib.real_engine import (
    PROMPTS,
    ask,
    assert_exact_over_a_swap,
    assert_same,
    done,
    submit,
    weights,
)

from grpo_components.exchange.weight_probe import PROBE_IDS
from grpo_components.exchange.weights import pack_bucket, pushed_layers
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.rollout.schedule import Schedule, open_schedule
from grpo_components.settings import LoraSettings
from grpo_components.trajectory import TokenSequence
from grpo_tools.replay.recorded_run import RecordedSchedule, read_schedule


def test_weights_loaded_into_a_running_engine_are_those_of_a_fresh_one(make_engine, checkpoints):
    """The first engine's files have a redundant head; the equivalence ladder has the others."""
    engine = make_engine(checkpoints / "redundant_A")
    before = done(submit(engine))
    given = weights(checkpoints / "tied_B")
    engine.load_weights(3, given).result()
    for tensor in given.values():  # the next delta push changes these bytes
        tensor.zero_()
    after = done(submit(engine))
    assert_same(after, done(submit(make_engine(checkpoints / "tied_B"))))
    assert [c.token_ids.tolist() for c in before] != [c.token_ids.tolist() for c in after]
    assert {int(v) for c in before for v in c.token_versions} == {0}
    assert {int(v) for c in after for v in c.token_versions} == {3}


def test_weights_that_vllm_reads_past_its_loaders_are_missed_loudly(
    make_engine, checkpoints, monkeypatch
):
    """vLLM reports that it loaded the experts of gpt-oss, and keeps the old ones."""
    from grpo_components.rollout import vllm_weights

    engine = make_engine(checkpoints / "experts_A")
    monkeypatch.setattr(vllm_weights, "_WRITTEN_DIRECTLY", {"OAIAttention"})
    with pytest.raises(RuntimeError, match=r"does not see the parameters .*w13_weight"):
        engine.load_weights(1, weights(checkpoints / "experts_B")).result()


def test_more_prompts_at_once_than_fit_into_one_step_are_all_answered(make_engine, checkpoints):
    """vLLM would read a part of one of them, and its CPU sampler cannot go back after that."""
    engine = make_engine(checkpoints / "tied_A")
    prompts = np.random.default_rng(0).integers(1, 255, (24, 400)).tolist()  # of 4096 in a step

    def answer(i):
        return ask(engine, prompts[i], 2, seed=i, stop_token_ids=[0])

    together, alone = done(map(answer, range(24))), [answer(i).result() for i in range(24)]
    assert_same(together, alone, atol=1e-5)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8, target_modules=("q_proj",))])
def test_ids_beyond_the_tokenizer_are_never_sampled_and_the_trainer_knows(
    make_engine, checkpoints, lora
):
    """Of 256 ids, the tokenizer knows 190: the model would sample one of the others often."""
    folder, num_ids = checkpoints / "untied_B", 190
    first = folder if lora else checkpoints / "untied_A"
    engine = make_engine(first, num_ids=num_ids, lora=lora)
    if lora is None:
        engine.load_weights(1, weights(folder)).result()
    found, likeliest = (done(submit(engine, 40, temperature=each)) for each in (0.7, 0.0))
    assert max(c.token_ids.max() for c in [*found, *likeliest]) < num_ids
    records = [
        TokenSequence(np.array(prompt), completion.token_ids.astype(np.int64), 0.7)
        for prompt, completion in zip(PROMPTS, found, strict=True)
    ]
    model = hugging_face(str(folder))
    model.load_state_dict(weights(folder))

    def gap(num_ids):
        logprobs = ResponseLogprobs(model, chunk_tokens=50, num_ids=num_ids)
        trained = logprobs(token_batch(records))[0].detach().numpy()
        return np.abs(trained - np.concatenate([c.logprobs for c in found])).max()

    assert gap(num_ids) < 1e-4 < 0.1 < gap(None)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_running_requests_go_on_over_a_swap_with_exact_versions(
    make_engine, checkpoints, force_cuda_defaults, scheduling, recompute
):
    """Asynchronous: the batch in flight at the swap was sampled by the old weights."""
    if scheduling == "asynchronous":
        force_cuda_defaults()
    old, new = checkpoints / "tied_A", checkpoints / "tied_B"
    engine = make_engine(old, recompute_kv_after_pull=recompute)
    assert_exact_over_a_swap(engine, old, new, recompute)


def entered(folder):
    lines = Path(folder, "schedule_generator_0.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines[1:]]
    return [(line["step"], name) for line in steps for name in line["entered"]]


def test_a_replayed_schedule_gives_the_same_bits_whenever_requests_and_weights_come(
    make_engine, checkpoints, tmp_path
):
    """The swap lies in the middle of responses, and half of the requests join after it."""
    new, lengths = weights(checkpoints / "tied_B"), [60, 200]

    def begin(engine, number):
        name, size = f"group {number} sample 0", lengths[number % 2]
        return ask(engine, PROMPTS[number], size, seed=number, stop_token_ids=[0], name=name)

    first, second = (str(tmp_path / name) for name in ("first", "second"))
    engine = make_engine(checkpoints / "tied_A", schedule=open_schedule(first))
    early = [begin(engine, i) for i in range(4)]
    ask(engine, [9, 9], 15, name="clock").result()
    engine.load_weights(1, new).result()
    recorded = done(early + [begin(engine, i) for i in range(4, 8)])
    assert any({0, 1} <= set(c.token_versions.tolist()) for c in recorded), "nothing spans the swap"

    engine.close()
    schedule = open_schedule(second, partial(read_schedule, first, 60))
    engine = make_engine(checkpoints / "tied_A", schedule=schedule)
    loading = engine.load_weights(1, new)
    late = {i: begin(engine, i) for i in reversed(range(8))}
    clock = ask(engine, [9, 9], 15, name="clock")
    replayed = done(late[i] for i in range(8))
    done([loading, clock])
    assert_same(recorded, replayed)
    for a, b in zip(recorded, replayed, strict=True):
        np.testing.assert_array_equal(a.token_versions, b.token_versions)
    assert entered(first) == entered(second)


def test_a_replay_without_what_comes_next_ends_the_engine_with_its_name(
    make_engine, checkpoints, tmp_path
):
    from grpo_components.rollout.engine import EngineStoppedError

    (tmp_path / "schedule_generator_0.jsonl").write_text(
        '{"life": 0, "probe_tokens": 0}\n'
        '{"step": 0, "entered": ["group 7 sample 0", "a request"]}\n'
    )
    schedule = Schedule(recorded=read_schedule(str(tmp_path), 0.05))
    engine = make_engine(checkpoints / "tied_A", schedule=schedule)
    asked = ask(engine, [1, 2], 4)
    with pytest.raises(EngineStoppedError, match=r"0\.05 s.*group 7 sample 0"):
        asked.result(timeout=60)


def test_what_is_wrong_fails_alone_and_a_closed_engine_answers_with_an_error(
    make_engine, checkpoints
):
    """Wrong weights, before anything is loaded, a prompt that is too long, a wrong request."""
    from grpo_components.rollout.engine import EngineStoppedError

    engine = make_engine(checkpoints / "tied_A")
    before = done(submit(engine))
    good = weights(checkpoints / "tied_B")
    unnormed = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    for wrong, facts in [
        (unnormed, r"model\.norm\.weight"),
        ({**good, "extra": torch.zeros(1)}, "extra"),
        ({**good, "model.norm.weight": torch.zeros(5)}, r"model\.norm\.weight.*\[5\].*\[64\]"),
    ]:
        with pytest.raises(ValueError, match=facts):
            engine.load_weights(1, wrong)
    fine, long = submit(engine), ask(engine, [1] * 600, 4)
    with pytest.raises(Exception, match="600"):
        long.result()
    with pytest.raises(ValueError, match="temperature"):
        ask(engine, [5, 6, 7], temperature=-1.0).result(timeout=60)
    assert_same(before, done(fine))
    running = submit(engine, max_tokens=400)
    engine.close()
    for future in (running[0], submit(engine)[0]):
        with pytest.raises(EngineStoppedError):
            future.result(timeout=30)


def keep_the_cache(monkeypatch):
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(LLMEngine, "reset_prefix_cache", lambda self, **_: False)


def load_nothing(monkeypatch):
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "load_weights", lambda self, tensors: set())


@pytest.mark.parametrize(
    ("refuse", "reason"), [(keep_the_cache, "KV cache"), (load_nothing, "parameters model")]
)
def test_what_vllm_did_not_do_at_a_swap_ends_the_engine_with_the_reason(
    make_engine, checkpoints, monkeypatch, refuse, reason
):
    """vLLM reports it by a return value, not by an exception. The engine is freed nevertheless."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    engine = make_engine(checkpoints / "tied_A", recompute_kv_after_pull=True)
    refuse(monkeypatch)
    with pytest.raises(RuntimeError, match=reason):
        engine.load_weights(1, weights(checkpoints / "tied_B")).result(timeout=60)
    with pytest.raises(RuntimeError, match=reason):
        submit(engine)[0].result(timeout=60)
    engine.close()
    assert not model_parallel_is_initialized()


def test_a_watch_sees_the_tokens_while_they_are_sampled_and_may_end_them(make_engine, checkpoints):
    engine = make_engine(checkpoints / "tied_A")
    whole = done(submit(engine))
    long = [i for i, each in enumerate(whole) if len(each.token_ids) > 8]
    seen = {i: [] for i in range(len(PROMPTS))}

    def watch(i, token_ids):
        seen[i].append(list(token_ids))
        return i in long[:2] and len(token_ids) == 5

    watched = done(
        [ask(engine, ids, seed=i, watch=partial(watch, i)) for i, ids in enumerate(PROMPTS)]
    )
    assert len(long) > 2
    for i, (one, other) in enumerate(zip(watched, whole, strict=True)):
        size = 5 if i in long[:2] else len(other.token_ids)
        assert one.finish_reason == ("stop" if i in long[:2] else other.finish_reason)
        np.testing.assert_array_equal(one.token_ids, other.token_ids[:size])
        np.testing.assert_array_equal(one.logprobs, other.logprobs[:size])
        assert one.token_versions.tolist() == [0] * size
        assert seen[i][:4] == [one.token_ids[:n].tolist() for n in range(1, 5)]
    assert_same([ask(engine, PROMPTS[0]).result()], whole[:1])


def test_a_swap_gives_the_weight_probe_by_the_new_weights_while_requests_run(
    make_engine, checkpoints
):
    """And a conversation that goes on finds its tokens in the prefix cache, but not after it."""
    engine = make_engine(checkpoints / "tied_A")
    prompt = [7 + number % 200 for number in range(70)]
    said = ask(engine, prompt).result()
    again = [*prompt, *said.token_ids.tolist(), 5, 6]
    assert said.cached_tokens == 0
    assert ask(engine, again).result().cached_tokens == 64  # two whole blocks of 32
    running = submit(engine, max_tokens=200)
    first, other, once_more = (
        engine.load_weights(version, weights(checkpoints / name)).result(timeout=60)
        for version, name in enumerate(("tied_B", "tied_A", "tied_B"), start=1)
    )
    assert not all(future.done() for future in running), "the engine was idle"
    assert len(first.logprobs) == len(PROBE_IDS) - 1 and max(first.logprobs) < 0
    assert first.logprobs == pytest.approx(once_more.logprobs, abs=1e-5)
    assert np.abs(np.subtract(first.logprobs, other.logprobs)).max() > 0.01
    assert [each.label for each in (first, other, once_more)] == [1, 2, 3]
    assert [each.cached_tokens for each in (first, other, once_more)] == [0, 0, 0]
    assert ask(engine, again).result().cached_tokens == 0
    assert all(len(each.token_ids) for each in done(running))


@pytest.mark.parametrize("kind", ["redundant", "untied", "experts"])
def test_weights_in_the_engine_have_the_hashes_of_the_pushed_ones(
    make_engine, checkpoints, monkeypatch, kind
):
    """In bf16; as on a GPU, where vLLM packs nothing."""
    from vllm import _custom_ops

    old, new = (checkpoints / f"{name}" for name in (f"{kind}_A", f"{kind}_B"))
    given = weights(new if new.exists() else checkpoints / "tied_B")
    given = {name: tensor.bfloat16() for name, tensor in given.items()}
    engine = make_engine(old, dtype="bf16")
    assert engine.load_weights(1, given).result(timeout=60).layers is None  # it is packed
    engine.close()
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    engine = make_engine(old, dtype="bf16")
    found = engine.load_weights(1, given).result(timeout=60).layers
    assert found == pushed_layers([pack_bucket([*given.items()])[0]])
    given["model.layers.1.self_attn.o_proj.weight"] *= 2
    other = engine.load_weights(2, given).result(timeout=60).layers
    assert [name for name in found if found[name] != other[name]] == ["layer 1"]


def test_of_two_swaps_before_one_step_each_has_its_own_reading(make_engine, checkpoints):
    both = Schedule(recorded=RecordedSchedule([(0, "weights 1"), (0, "weights 2")], 60))
    engine = make_engine(checkpoints / "tied_A", schedule=both)
    pulls = [
        engine.load_weights(version, weights(checkpoints / name))
        for version, name in enumerate(("tied_B", "tied_A"), start=1)
    ]
    first, second = (pull.result(timeout=60) for pull in pulls)
    assert (first.label, second.label) == (1, 2)
    assert np.abs(np.subtract(first.logprobs, second.logprobs)).max() > 0.01


def test_the_weight_probe_sees_a_stale_prefix_cache_and_a_wrong_label(
    make_engine, checkpoints, monkeypatch
):
    from grpo_components.rollout import vllm_backend

    engine = make_engine(checkpoints / "tied_A")
    library = engine._backend._engine
    name = library.set_weight_version
    with monkeypatch.context() as planted:
        planted.setattr(vllm_backend, "empty_prefix_cache", lambda scheduler: None)
        planted.setattr(library, "set_weight_version", lambda version: name("7"))
        readings = [
            engine.load_weights(version, weights(checkpoints / "tied_B")).result(timeout=60)
            for version in (1, 2)
        ]
    assert [each.cached_tokens for each in readings] == [0, 32]
    assert [each.label for each in readings] == [7, 7]
    sound = engine.load_weights(3, weights(checkpoints / "tied_B")).result(timeout=60)
    assert (sound.label, sound.cached_tokens) == (3, 0)
    assert sound.logprobs == pytest.approx(readings[0].logprobs, abs=1e-5)

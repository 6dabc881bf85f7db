"""After a swap of the weights under load, new requests get what a fresh engine gives them.

Real vLLM. Prompts are longer than a block of the CPU's prefix cache (32 tokens); shorter ones are
never cached, and show nothing.
"""

from contextlib import closing

import numpy as np
import pytest
from lib import real_engine
from lib.real_engine import weights

from grpo_components.rollout.schedule import Schedule
from grpo_tools.replay.recorded_run import RecordedSchedule

LONG = np.random.default_rng(0).integers(1, 255, 300).tolist()
SHORT = LONG[:100]
ASKED = {}, {"seed": 7}, {"temperature": 0.0}  # the last as an evaluation asks


def ask(engine, prompt=LONG, **options):
    return real_engine.ask(engine, prompt, **{"seed": 1, "max_tokens": 8, **options})


def assert_same(left, right):
    real_engine.assert_same([left], [right], atol=1e-5)


@pytest.fixture
def scheduled(make_engine, checkpoints):
    """Builds an engine that lets each command in before the step that an entry names."""

    def build(*entries, **options):
        schedule = Schedule(recorded=RecordedSchedule(entries, 60))
        return make_engine(checkpoints / "tied_A", schedule=schedule, **options)

    return build


@pytest.fixture
def cached(build_engine, monkeypatch):
    """How many prompt tokens each finished request read from the cache, in their order."""
    from vllm.v1.engine.llm_engine import LLMEngine

    counts, step = [], LLMEngine.step

    def note(self):
        outputs = step(self)
        asked = [output for output in outputs if output.prompt_logprobs is None]  # not the probe
        counts.extend(output.num_cached_tokens for output in asked if output.finished)
        return outputs

    monkeypatch.setattr(LLMEngine, "step", note)
    return counts


def spans(completion):
    return sorted(set(completion.token_versions.tolist()))


@pytest.fixture(scope="module")
def fresh(build_engine, checkpoints):
    """What fresh engines answer to `LONG`, by checkpoint, for each of `ASKED`."""
    answers = {}
    for name in ("tied_A", "tied_B"):
        with closing(build_engine(checkpoints / name)) as engine:
            answers[name] = [ask(engine, **own).result() for own in ASKED]
    return answers


def test_a_block_that_stays_cached_is_an_error(make_engine, checkpoints, monkeypatch):
    """vLLM's `evict_blocks` does not report what it did."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    engine = make_engine(checkpoints / "tied_A")
    ask(engine, SHORT).result(timeout=60)
    monkeypatch.setattr(KVCacheManager, "evict_blocks", lambda self, block_ids: None)
    with pytest.raises(RuntimeError, match="prefix cache still has 3 blocks of old weights"):
        engine.load_weights(1, weights(checkpoints / "tied_B")).result(timeout=60)


@pytest.mark.parametrize("recompute", [False, True])
def test_new_requests_read_no_kv_of_old_weights_that_running_ones_hold(
    scheduled, checkpoints, fresh, cached, recompute
):
    load = [(0, f"load {i}") for i in range(3)]
    new = [(30, f"new {i}") for i in range(3)]
    engine = scheduled(*load, (30, "weights 1"), *new, recompute_kv_after_pull=recompute)
    running = [ask(engine, seed=i, max_tokens=150, name=f"load {i}") for i in range(3)]
    loading = engine.load_weights(1, weights(checkpoints / "tied_B"))
    answers = [ask(engine, name=f"new {i}", **own) for i, own in enumerate(ASKED)]
    answers = [answer.result(timeout=60) for answer in answers]
    assert not any(future.done() for future in running), "the engine was idle"
    loading.result(timeout=60)
    for answer, expected in zip(answers, fresh["tied_B"], strict=True):
        assert_same(answer, expected)
        assert spans(answer) == [1]
    # The first reads its prompt, unless running ones have read it again; all others share that.
    assert cached == [288 if recompute else 0, 288, 288]
    assert all(spans(future.result()) == [0, 1] for future in running)


def test_a_request_that_waited_while_the_weights_came_reads_and_leaves_only_new_kv(
    scheduled, checkpoints, fresh
):
    """It was hashed before the swap, and its prompt is read after it."""
    entries = (0, "running"), (5, "waiting"), (6, "weights 1"), (6, "same")
    engine = scheduled(*entries, max_num_seqs=1)  # one at a time
    running = ask(engine, max_tokens=60, name="running")
    waiting = ask(engine, name="waiting")
    engine.load_weights(1, weights(checkpoints / "tied_B"))
    same = ask(engine, name="same")
    assert spans(running.result(timeout=60)) == [0, 1]
    assert_same(waiting.result(timeout=60), fresh["tied_B"][0])
    assert_same(same.result(timeout=60), fresh["tied_B"][0])


def test_blocks_that_a_request_fills_after_the_swap_on_top_of_old_kv_are_its_own(
    scheduled, make_engine, checkpoints
):
    """As the next turn of a conversation would read them: its prompt has the response in it."""
    engine = scheduled((0, "first turn"), (10, "weights 1"), (220, "second turn"))
    # It fills blocks before and after the swap.
    first = ask(engine, SHORT, max_tokens=220, name="first turn")
    engine.load_weights(1, weights(checkpoints / "tied_B"))
    said = first.result(timeout=60)
    assert spans(said) == [0, 1]
    conversation = [*SHORT, *said.token_ids.tolist()]
    second = ask(engine, conversation, name="second turn").result(timeout=60)
    assert_same(second, ask(make_engine(checkpoints / "tied_B"), conversation).result())


def test_other_weights_of_the_same_or_an_older_version_are_new_weights(
    scheduled, checkpoints, fresh
):
    """As after a rollback, a restore or a second load: no version number tells KV apart."""
    swaps = (5, "B"), (5, "A"), (3, "B")
    entries = [(0, "running")]
    for number, (version, _) in enumerate(swaps):
        entries += [(10 + 20 * number, f"weights {version}"), (10 + 20 * number, f"new {number}")]
    engine = scheduled(*entries)
    running = ask(engine, max_tokens=120, name="running")
    answers = []
    for number, (version, letter) in enumerate(swaps):
        engine.load_weights(version, weights(checkpoints / f"tied_{letter}"))
        answers.append(ask(engine, name=f"new {number}"))
    for (_, letter), answer in zip(swaps, answers, strict=True):
        assert_same(answer.result(timeout=60), fresh[f"tied_{letter}"][0])
    assert len(running.result(timeout=60).token_ids) == 120


def test_a_running_request_that_lost_its_blocks_for_lack_of_room_leaves_no_old_kv(
    scheduled, checkpoints, fresh
):
    """vLLM computes it again, and looks for its old blocks."""
    engine = scheduled((0, "winner"), (0, "loser"), (10, "weights 1"), (200, "new"))
    scheduler = engine._backend._engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 24)  # twelve each, and each wants more
    lost, preempt = [], scheduler._preempt_request

    def note_lost(request, *args, **kwargs):
        lost.append(request.prompt_token_ids == LONG)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = note_lost
    winner = ask(engine, LONG[::-1], max_tokens=150, name="winner")
    loser = ask(engine, max_tokens=150, name="loser")
    engine.load_weights(1, weights(checkpoints / "tied_B"))
    new = ask(engine, name="new")
    assert_same(new.result(timeout=60), fresh["tied_B"][0])
    assert [len(future.result(timeout=60).token_ids) for future in (winner, loser)] == [150, 150]
    assert lost == [True]


def test_with_cudas_scheduling_new_requests_read_no_kv_of_old_weights_either(
    scheduled, make_engine, checkpoints, force_cuda_defaults
):
    """Prompts are read in three parts, and the weights come after the first part of one of them.

    Greedy: vLLM cannot set the random generator of a seeded request back on a CPU, which it does
    for every part of a prompt but the last.
    """
    force_cuda_defaults(batched_tokens=128)
    greedy = {"temperature": 0.0}
    expected = ask(make_engine(checkpoints / "tied_B"), **greedy).result()
    entries = (0, "running"), (20, "in parts"), (21, "weights 1"), (21, "new"), (21, "new")
    engine = scheduled(*entries)
    running = ask(engine, SHORT, max_tokens=150, name="running", **greedy)
    in_parts = ask(engine, name="in parts", **greedy)
    engine.load_weights(1, weights(checkpoints / "tied_B"))
    new = [ask(engine, name="new", **greedy) for _ in range(2)]
    for answer in new:
        assert_same(answer.result(timeout=60), expected)
        assert spans(answer.result()) == [1]
    assert not running.done(), "the engine was idle"
    assert spans(in_parts.result(timeout=60)) == [1]
    assert spans(running.result(timeout=60)) == [0, 1]

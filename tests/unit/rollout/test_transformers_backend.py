"""The transformers backend: exact versions, seeds of each request; a rung has vLLM's logprobs."""

from functools import partial

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
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from grpo_components.exchange.weight_probe import PROBE_IDS
from grpo_components.exchange.weights import pack_bucket, pushed_layers


@pytest.fixture
def make(make_engine):
    return partial(make_engine, backend="transformers")


def test_capped_scores_of_gemma_2_are_those_of_a_plain_forward_pass(make, tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "sliding_window": 8}
    config = Gemma2Config(**sizes, **caps, max_position_embeddings=512, eos_token_id=None)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    for prompt, found in zip(PROMPTS, done(submit(make(tmp_path))), strict=True):
        ids = torch.tensor([prompt + found.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_running_requests_go_on_over_a_swap_with_exact_versions(make, checkpoints, recompute):
    old, new = checkpoints / "tied_A", checkpoints / "tied_B"
    engine = make(old, recompute_kv_after_pull=recompute)
    assert_exact_over_a_swap(engine, old, new, recompute)


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(make, checkpoints, one_thread):
    """To the bit. Prompts of several lengths at once, more than there are slots."""
    engine = make(checkpoints / "tied_A", max_num_seqs=3)
    asked = [(prompt + [9] * i, i) for i, prompt in enumerate(PROMPTS)]
    together = done([ask(engine, ids, seed=seed) for ids, seed in asked])
    alone = [ask(engine, ids, seed=seed).result(timeout=60) for ids, seed in asked]
    assert_same(together, alone)
    first, same, other = done([ask(engine, [5, 6], seed=seed) for seed in (1, 1, 2)])
    assert first.token_ids.tolist() == same.token_ids.tolist() != other.token_ids.tolist()


def test_samples_follow_the_distribution_at_their_temperature(make, checkpoints):
    engine = make(checkpoints / "untied_B", max_num_seqs=256)
    found = done([ask(engine, [5, 6], 1, seed=i, temperature=0.5) for i in range(4000)])
    ids = np.array([int(each.token_ids[0]) for each in found])
    by_id = {int(each.token_ids[0]): float(np.exp(each.logprobs[0])) for each in found}
    for token, probability in by_id.items():
        spread = np.sqrt(probability * (1 - probability) / len(ids))
        assert abs((ids == token).mean() - probability) < 5 * spread + 1e-3
    assert sum(by_id.values()) > 0.9


def test_a_response_ends_at_a_stop_token_a_limit_or_its_watch(make, checkpoints):
    engine = make(checkpoints / "tied_A")
    whole = ask(engine, PROMPTS[0]).result(timeout=60)
    stop = int(whole.token_ids[5])
    size = whole.token_ids.tolist().index(stop) + 1
    seen = []

    def watch(token_ids):
        seen.append(list(token_ids))
        return len(token_ids) == 4

    ended, watched, full = done(
        [
            ask(engine, PROMPTS[0], stop_token_ids=[stop]),
            ask(engine, PROMPTS[0], watch=watch),
            ask(engine, [1] * 500, 100),  # of 512 positions
        ]
    )
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", size)
    assert (watched.finish_reason, watched.token_ids.tolist()) == ("stop", seen[-1])
    assert seen == [whole.token_ids[:n].tolist() for n in range(1, 5)]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 12)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 24)


def test_what_is_wrong_fails_alone(make, checkpoints):
    engine = make(checkpoints / "tied_A")
    long, fine = ask(engine, [1] * 512, 4), ask(engine, [1] * 511, 4)
    with pytest.raises(ValueError, match="512"):
        long.result(timeout=60)
    assert len(fine.result(timeout=60).token_ids) == 1


def test_the_weight_probe_is_that_of_vllm(make, make_engine, checkpoints):
    readings = []
    for backend in ("vllm", "transformers"):
        engine = make_engine(checkpoints / "untied_A", backend=backend)
        running = submit(engine, 100)
        reading = engine.load_weights(3, weights(checkpoints / "untied_B")).result(timeout=60)
        assert (reading.label, reading.cached_tokens) == (3, 0)
        assert all(len(each.token_ids) for each in done(running))
        readings.append(reading.logprobs)
        engine.close()
    assert len(readings[0]) == len(PROBE_IDS) - 1
    np.testing.assert_allclose(*readings, atol=1e-4)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_weights_in_the_engine_have_the_hashes_of_the_pushed_ones(make, checkpoints, kind):
    given = weights(checkpoints / f"{kind}_B")
    exact = make(checkpoints / f"{kind}_A").load_weights(1, given).result(timeout=60)
    assert exact.layers is None  # float32 on a CPU: logprobs are compared
    given = {name: tensor.bfloat16() for name, tensor in given.items()}
    engine = make(checkpoints / f"{kind}_A", dtype="bf16")
    found = engine.load_weights(1, given).result(timeout=60).layers
    assert found == pushed_layers([pack_bucket([*given.items()])[0]])


def test_weights_that_the_model_does_not_take_end_the_engine(make, checkpoints, monkeypatch):
    from grpo_components.rollout import engine as module

    engine = make(checkpoints / "tied_A")
    monkeypatch.setattr(module, "check_names_and_shapes", lambda *_: None)
    given = weights(checkpoints / "tied_B")
    del given["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"missing.*model\.norm\.weight"):
        engine.load_weights(1, given).result(timeout=60)


def test_a_response_ends_where_the_models_own_files_say(make, make_engine, checkpoints, tmp_path):
    """As in vLLM, whatever the config asks."""
    whole = ask(make(checkpoints / "tied_A"), PROMPTS[0]).result(timeout=60)
    end = int(whole.token_ids[3])
    tensors = load_file(checkpoints / "tied_A" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (checkpoints / "tied_A" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{end}, 250]}}')
    for backend in ("vllm", "transformers"):
        engine = make_engine(tmp_path, backend=backend)
        found = ask(engine, PROMPTS[0], 24).result(timeout=60)
        assert found.token_ids[-1] in (end, 250) or len(found.token_ids) == 24
        if backend == "transformers":
            assert (found.finish_reason, int(found.token_ids[-1])) == ("stop", end)
        engine.close()

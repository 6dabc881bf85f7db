"""Hashes of weights by layer: what vLLM fuses and cuts is what was pushed, and no other version."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_components.exchange.weight_deltas import DeltaEncoder, RebuiltWeights
from grpo_components.exchange.weights import (
    _HASHED_AT_ONCE,
    checkpoint_tensors,
    hash_layers,
    hash_named,
    hash_values,
    join_shares,
    keeps_values,
    pack_bucket,
    pushed_layers,
)

SIZES = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 120, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
with torch.device("meta"):
    MODEL = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True))
SHAPES = {name: tuple(parameter.shape) for name, parameter in MODEL.named_parameters()}
pytestmark = pytest.mark.usefixtures("one_thread")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def random_weights(seed):
    numbers = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=numbers) for name, shape in SHAPES.items()}


def rounded(weights):
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def pushed(weights):
    return pushed_layers([pack_bucket(list(weights.items()))[0]])


def worker(weights, rank, workers):
    """The parameters of one of vLLM's workers: its rows or columns, fused, and rows of zeros."""
    found = {}
    for name, tensor in weights.items():
        part, kind = tensor, name.rsplit(".", 2)[-2]
        if kind in ("o_proj", "down_proj"):
            part = tensor.chunk(workers, 1)[rank]
        elif "norm" not in kind:
            if kind in ("embed_tokens", "lm_head"):
                tensor = torch.cat([tensor, tensor.new_zeros(64 - len(tensor), tensor.shape[1])])
            part = tensor.chunk(workers)[rank]
        fused = next((whole for whole, parts in FUSED.items() if kind in parts), kind)
        found.setdefault(name.replace(kind, fused), []).append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


def loaded(weights, workers=1):
    """Hashes by layer of an engine with these weights."""
    shares = (worker(weights, rank, workers).items() for rank in range(workers))
    return hash_layers(join_shares([hash_named(share) for share in shares]))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_fused_cut_and_copied_parameters_have_the_hashes_of_what_was_pushed(
    seed, workers, is_tied, data
):
    given, head = rounded(random_weights(seed)), "lm_head.weight"
    engine = dict(given)
    given[head] = given["model.embed_tokens.weight"]  # a tied head may be sent, and is one tensor
    if not is_tied:
        engine[head] = given[head] = given[head].flip(0) * 2
    assert loaded(engine, workers) == pushed(given)
    name = data.draw(st.sampled_from(sorted(engine)))
    engine[name] = engine[name].clone()
    engine[name].view(-1)[data.draw(st.integers(0, engine[name].numel() - 1))] += 1
    number = re.search(r"layers\.(\d)", name)
    now, then = loaded(engine, workers), pushed(given)
    changed = {layer for layer in then if now[layer] != then[layer]}
    assert changed == {f"layer {number[1]}" if number else "the rest"}


def test_key_heads_that_several_workers_have_are_seen_as_other_values(tmp_path):
    """So such an engine's weights are never compared; one with a part for each worker is."""
    weights = random_weights(0)
    save_file(weights, tmp_path / "model.safetensors")
    sound = partial(loaded, rounded(weights), 4)
    copies = {name: torch.cat([t, t]) if "k_proj" in name else t for name, t in weights.items()}
    for engine, dtype, keeps in (
        (sound, torch.bfloat16, True),
        (partial(loaded, rounded(copies), 4), torch.bfloat16, False),
        (sound, torch.float32, False),
    ):
        assert keeps_values(engine, "cpu", checkpoint_tensors(tmp_path, SHAPES), dtype) == keeps


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 10, 100, 1000]), st.booleans())
def test_elements_that_moved_by_one_step_of_their_dtype_are_seen(seed, changed, both_ways):
    numbers = torch.Generator().manual_seed(seed)
    before = (0.02 * torch.randn(2000, generator=numbers)).bfloat16()
    after, chosen = before.clone(), torch.randperm(2000, generator=numbers)[:changed]
    steps = torch.ones(changed, dtype=torch.int16)
    if both_ways:
        steps[::2] = -1
    after.view(torch.int16)[chosen] += steps
    assert hash_values(before) != hash_values(after)
    assert hash_values(before) == hash_values(before.flip(0))
    assert hash_values(torch.cat([before, after])) == hash_values(before) + hash_values(after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_hash_is_of_all_parts_of_a_large_tensor(dtype, monkeypatch):
    tensor = torch.randn(40, 50).to(dtype)
    whole = hash_values(tensor.t())
    monkeypatch.setitem(_HASHED_AT_ONCE, "cpu", 300)
    assert hash_values(tensor) == whole != 0 == hash_values(torch.zeros(0, 3, dtype=dtype))


def test_float32_on_a_cpu_is_not_hashed_and_a_delta_keeps_the_hash_of_the_whole():
    weights = random_weights(0)
    assert pushed(weights) is None
    encoder, rebuilt = DeltaEncoder(), RebuiltWeights()
    for version, base in ((1, -1), (2, 1)):
        bucket = pack_bucket(list(rounded(random_weights(version)).items()))
        buckets = rebuilt.rebuild(version, [encoder.encode(version, bucket, base)])
        rebuilt.keep(buckets)
        assert pushed_layers(manifest for manifest, _ in buckets) == pushed_layers([bucket[0]])
        assert pushed_layers([bucket[0]]) == loaded(rounded(random_weights(version)))

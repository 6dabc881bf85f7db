"""Weights keep their bits through names and buckets; damage is found before anything is loaded."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.models.phi3 import phi3, phi3_hf_to_tune
from torchtune.models.qwen2 import qwen2, qwen2_hf_to_tune

from grpo_components.exchange.weights import (
    check_names_and_shapes,
    checkpoint_shapes,
    hf_converter,
    layer_groups,
    pack_bucket,
    snapshot_checksum,
    unpack_bucket,
)

SIZES = {"vocab_size": 64, "num_layers": 3, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16}
HF_CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": None,
    "tie_word_embeddings": True,
}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "dim": 32}


def build(family):
    torch.manual_seed(0)
    if family == "QWEN2":
        model = qwen2(**SIZES, num_kv_heads=2, intermediate_dim=48, tie_word_embeddings=True)
        return model, lambda sd: qwen2_hf_to_tune(sd, **HEADS, tie_word_embeddings=True)
    if family == "LLAMA3":
        model = llama3(**SIZES, num_kv_heads=2, intermediate_dim=48)
        return model, lambda sd: hf_to_tune(sd, **HEADS)
    model = phi3(**SIZES, num_kv_heads=4, intermediate_dim=48)
    return model, lambda sd: phi3_hf_to_tune(sd, num_heads=4, num_kv_heads=4, dim=32)


@pytest.mark.parametrize("family", ["QWEN2", "LLAMA3", "PHI3_MINI"])
def test_layer_by_layer_conversion_is_undone_bit_for_bit_by_torchtunes_own(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    model, to_tune = build(family)
    state_dict, to_hf = model.state_dict(), hf_converter(family, tmp_path)
    converted = {}
    for names in layer_groups(state_dict):
        converted |= to_hf({name: state_dict[name] for name in names})
    back = to_tune(converted)
    assert back.keys() == state_dict.keys()
    assert all(torch.equal(back[name], state_dict[name]) for name in state_dict)
    assert all(name.startswith(("model.", "lm_head.")) for name in converted)


@pytest.mark.parametrize("family", ["GEMMA2", "LLAMA3_VISION", "REWARD"])
def test_a_family_that_cannot_be_converted_exactly_is_refused(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(ValueError, match=rf"checkpointer\.model_type: {family}.*allowed: LLAMA2"):
        hf_converter(family, tmp_path)


def test_units_are_one_layer_or_one_tensor():
    groups = layer_groups(["tok.weight", "layers.0.a", "layers.10.a", "layers.0.b", "norm.scale"])
    assert groups == [["tok.weight"], ["layers.0.a", "layers.0.b"], ["layers.10.a"], ["norm.scale"]]


def tensors():
    torch.manual_seed(0)
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.randn(4, 4).T),
        ("d", torch.arange(6, dtype=torch.int64).view(2, 3)),
    ]


def test_a_bucket_gives_back_every_bit_and_dtype():
    unpacked = unpack_bucket(*pack_bucket(tensors()))
    for name, tensor in tensors():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor), name


@pytest.mark.parametrize("position", [0, 59, 60, 80, -1])
def test_one_flipped_byte_is_found_and_its_tensor_named(position):
    manifest, bucket = pack_bucket(tensors())
    damaged = bucket.copy()
    damaged[position] ^= 1
    at = position % len(bucket)
    name = next(e.name for e in manifest if e.offset <= at < e.offset + e.nbytes)
    with pytest.raises(ValueError, match=f"tensor {name} is damaged"):
        unpack_bucket(manifest, damaged)


def test_a_truncated_bucket_is_found():
    manifest, bucket = pack_bucket(tensors())
    with pytest.raises(ValueError, match="tensor d is damaged"):
        unpack_bucket(manifest, bucket[:-1])


@pytest.mark.parametrize(
    "changes", [{"name": "z"}, {"dtype": "int32"}, {"shape": (5, 3)}, {"offset": 4}, {"nbytes": 8}]
)
def test_a_manifest_that_was_changed_is_found(changes):
    manifest, bucket = pack_bucket(tensors())
    with pytest.raises(ValueError, match=f"tensor {changes.get('name', 'a')} is damaged"):
        unpack_bucket((replace(manifest[0], **changes), *manifest[1:]), bucket)


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_head_may_be_missing(tied, tmp_path):
    """Or a lost one would leave the old one in use."""
    shapes = {"lm_head.weight": torch.zeros(2, 3), "a": torch.zeros(1)}
    save_file(shapes, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    expected = checkpoint_shapes(tmp_path)
    check_names_and_shapes({"a": (1,), "lm_head.weight": (2, 3)}, expected)
    if tied:
        check_names_and_shapes({"a": (1,)}, expected)
    else:
        with pytest.raises(ValueError, match=r"lack the tensor lm_head\.weight"):
            check_names_and_shapes({"a": (1,)}, expected)


def test_an_empty_bucket_is_no_error():
    manifest, bucket = pack_bucket([])
    assert unpack_bucket(manifest, bucket) == {}
    assert bucket.dtype == np.uint8


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_checksum_of_a_snapshot_is_the_same_whatever_the_number_of_ranks(ranks):
    whole = snapshot_checksum([pack_bucket(tensors())[0]])
    shares = [pack_bucket(tensors()[rank::ranks])[0] for rank in range(ranks)]
    assert snapshot_checksum(reversed(shares)) == whole
    int(whole, 16)


def renamed(tensors):
    return [("other", tensors[0][1]), *tensors[1:]]


def reshaped(tensors):
    return [("a", tensors[0][1].view(5, 3)), *tensors[1:]]


def retyped(tensors):
    return [*tensors[:3], ("d", tensors[3][1].view(torch.float64))]


def changed(tensors):
    return [("a", tensors[0][1] + 1e-6), *tensors[1:]]


def fewer(tensors):
    return tensors[:-1]


@pytest.mark.parametrize("change", [renamed, reshaped, retyped, changed, fewer])
def test_the_checksum_of_other_weights_is_another(change):
    manifests = [pack_bucket(each)[0] for each in (tensors(), change(tensors()))]
    assert snapshot_checksum(manifests[:1]) != snapshot_checksum(manifests[1:])

"""Weights keep their bits in buckets; damage is found before anything is loaded."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from lib.config_errors import refused_key
from safetensors.torch import save_file

from grpo_components.exchange.weights import (
    BucketBuffers,
    check_names_and_shapes,
    check_output_head,
    checkpoint_shapes,
    pack_bucket,
    snapshot_checksum,
    unpack_buckets,
)


def tensors():
    torch.manual_seed(0)
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.randn(4, 4).T),
        ("d", torch.arange(6, dtype=torch.int64).view(2, 3)),
    ]


def test_a_bucket_gives_back_every_bit_and_dtype():
    unpacked = unpack_buckets([pack_bucket(tensors())])
    for name, tensor in tensors():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor), name


@pytest.mark.parametrize(
    "changes", [{"name": "z"}, {"dtype": "int32"}, {"shape": (5, 3)}, {"offset": 4}, {"nbytes": 8}]
)
def test_a_manifest_that_was_changed_is_found(changes):
    manifest, bucket = pack_bucket(tensors())
    with pytest.raises(ValueError, match=f"tensor {changes.get('name', 'a')} "):
        unpack_buckets([((replace(manifest[0], **changes), *manifest[1:]), bucket)])


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_head_may_be_missing(tied, tmp_path):
    """Else a lost head would leave the old one in use."""
    shapes = {"lm_head.weight": torch.zeros(2, 3), "a": torch.zeros(1)}
    save_file(shapes, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    expected = checkpoint_shapes(tmp_path)
    check_names_and_shapes({"a": (1,), "lm_head.weight": (2, 3)}, expected)
    if tied:
        check_names_and_shapes({"a": (1,)}, expected)
    else:
        with pytest.raises(ValueError, match=r"^weights: .* lm_head\.weight"):
            check_names_and_shapes({"a": (1,)}, expected)


@pytest.mark.parametrize(
    ("tied", "head", "right"),
    [
        (True, "equal", True),
        (True, "other", False),
        (True, "other shape", False),
        (None, "missing", True),  # the family decides, which vLLM and the trainer know
        (None, "other", True),
    ],
)
def test_a_head_in_another_file_that_contradicts_the_config_is_refused(tied, head, right, tmp_path):
    """vLLM would use the other head, and torchtune the embedding."""
    embedding = torch.randn(5000, 2)
    heads = {"equal": embedding.clone(), "other": embedding.clone(), "other shape": torch.ones(3)}
    heads["other"][4999, 1] += 1
    tensors, files = {"model.embed_tokens.weight": embedding}, {}
    if head != "missing":
        tensors["lm_head.weight"] = heads[head]
    for number, (name, tensor) in enumerate(tensors.items()):
        files[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, tmp_path / files[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = {} if tied is None else {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if right:
        check_output_head(tmp_path)
    else:
        assert refused_key(check_output_head, tmp_path) == "base_model_path"


def test_a_buffer_is_written_again_only_once_nobody_uses_its_bucket():
    """Not even a slice of it: Ray and `unpack_buckets` keep nothing else."""
    buffers = BucketBuffers(8, pinned=False)

    def push(value):
        bucket = buffers.bucket()
        bucket.add("a", torch.tensor([value, value], dtype=torch.int32))
        return bucket.close()

    first, second = push(1), push(2)
    part = unpack_buckets([first])["a"][1:]
    address = first[1].ctypes.data
    assert address != second[1].ctypes.data
    del first
    third = push(3)
    assert third[1].ctypes.data != address and part.tolist() == [1]
    del part
    assert push(4)[1].ctypes.data == address
    assert unpack_buckets([second])["a"].tolist() == [2, 2]
    assert unpack_buckets([third])["a"].tolist() == [3, 3]


def test_an_empty_bucket_is_allowed():
    manifest, bucket = pack_bucket([])
    assert unpack_buckets([(manifest, bucket)]) == {}
    assert bucket.dtype == np.uint8


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_checksum_of_a_snapshot_is_the_same_whatever_the_number_of_ranks(ranks):
    whole = snapshot_checksum([pack_bucket(tensors())[0]])
    shares = [pack_bucket(tensors()[rank::ranks])[0] for rank in range(ranks)]
    assert snapshot_checksum(reversed(shares)) == whole
    int(whole, 16)


A, B, C, D = tensors()


@pytest.mark.parametrize(
    "other",
    [
        [("other", A[1]), B, C, D],
        [("a", A[1].view(5, 3)), B, C, D],
        [A, B, C, ("d", D[1].view(torch.float64))],
        [("a", A[1] + 1e-6), B, C, D],
        [A, B, C],
    ],
    ids=["renamed", "reshaped", "retyped", "changed", "fewer"],
)
def test_the_checksum_of_other_weights_is_another(other):
    checksums = {snapshot_checksum([pack_bucket(each)[0]]) for each in (tensors(), other)}
    assert len(checksums) == 2

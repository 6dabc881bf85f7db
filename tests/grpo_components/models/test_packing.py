"""Packed rows: each sequence sees itself from its first token on, and nobody else."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torchtune.models.gemma import gemma
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules.attention_utils import create_block_causal_mask

from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.packing import block_mask, document_mask, row_layout, row_width
from grpo_components.trajectory import Trajectory

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 128,
}
BUILDERS = {"qwen2": qwen2, "llama3_2": llama3_2, "gemma": partial(gemma, head_dim=16)}


@given(LENGTHS, st.integers(0, 7))
def test_positions_start_anew_with_every_sequence(lengths, padding):
    positions, numbers = row_layout(lengths, sum(lengths) + padding)
    expected = [place for length in [*lengths, *[1] * padding] for place in range(length)]
    assert positions.tolist() == [expected]
    counts = torch.bincount(numbers[0]).tolist()
    assert counts == [*lengths, *[1] * padding] and (numbers.diff() >= 0).all()


@given(LENGTHS, st.integers(0, 7))
def test_the_dense_mask_is_torchtunes_for_packed_data(lengths, padding):
    """To which each padding token is a sequence of its own."""
    _, numbers = row_layout(lengths, sum(lengths) + padding)
    expected = create_block_causal_mask([torch.tensor([*lengths, *[1] * padding])])
    assert torch.equal(document_mask(numbers), expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_the_block_mask_hides_no_pair_and_shows_only_those_of_the_dense_one(lengths):
    _, numbers = row_layout(lengths, row_width(sum(lengths)))
    dense, blocks = document_mask(numbers)[0], block_mask(numbers)
    width = dense.shape[0]
    assert blocks.shape == (1, 1, width, width)
    assert torch.equal(create_mask(blocks.mask_mod, 1, 1, width, width, device="cpu")[0, 0], dense)
    visited = blocks.to_dense()[0, 0].bool().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (visited | ~dense).all()


@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (128, 128), (129, 256), (4096, 4096)])
def test_a_row_is_the_budget_in_whole_blocks(tokens, width):
    assert row_width(tokens) == width


def ragged(number):
    rng = np.random.default_rng(number)
    prompt, size = int(rng.integers(1, 9)), int(rng.integers(1, 12))
    return Trajectory(
        prompt_ids=rng.integers(0, 64, prompt),
        response_ids=rng.integers(0, 64, size),
        response_mask=rng.random(size) < 0.8,
        generator_logprobs=np.zeros(size, np.float32),
        token_versions=np.zeros(size, np.int32),
        prompt_index=0,
        epoch=0,
        group_id=0,
        attempt=0,
        finish_reason="stop",
        temperature=(1.0, 0.7)[number % 2],
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_packed_and_padded_logprobs_and_gradients_are_the_same(name):
    torch.manual_seed(0)
    model = BUILDERS[name](**SIZES)
    logprobs = ResponseLogprobs(model, chunk_tokens=16)
    records = [ragged(number) for number in range(5)]
    masks = [record.response_mask for record in records]
    padded = logprobs(token_batch(records, masks))
    packed = logprobs(token_batch(records, masks, packed_width=128))
    for ours, theirs in zip(packed, padded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    parameters = list(model.parameters())
    weights = torch.linspace(-1, 1, len(padded[0]))
    expected = torch.autograd.grad(padded[0] @ weights, parameters)
    actual = torch.autograd.grad(packed[0] @ weights, parameters)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * largest)


def test_a_row_that_is_too_narrow_is_as_wide_as_its_sequences():
    records = [ragged(number) for number in range(3)]
    tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in records)
    assert token_batch(records, packed_width=1).tokens.shape == (1, tokens)

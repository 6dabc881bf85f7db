"""A prompt computed once gives the logprobs and gradients of one row per response."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.logprobs import whole_logprobs
from lib.policies import SIZES, random_weights
from lib.properties import many
from torchtune.models.gemma2 import gemma2
from torchtune.models.qwen2 import qwen2

from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.shared_prompts import Part, arrange, share_prompts, to_device
from grpo_components.trajectory import TokenSequence

GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.lists(st.booleans(), max_size=12), min_size=1)),
    min_size=1,
    max_size=4,
)
"""Prompt length, and the mask of each response."""


def build():
    return random_weights(qwen2(**SIZES))


def sequences(groups):
    """Responses of all groups, in an order that mixes them, with masks."""
    rng, found = np.random.default_rng(0), []
    for length, masks in groups:
        prompt = rng.integers(0, 64, length)
        for mask in masks:
            ids, temperature = rng.integers(0, 64, len(mask)), rng.uniform(0.5, 1.5)
            found.append((TokenSequence(prompt.copy(), ids, temperature), np.array(mask, bool)))
    order = rng.permutation(len(found))
    return [found[i][0] for i in order], [found[i][1] for i in order]


def gradients(model, values):
    weights = torch.linspace(-1, 1.5, values.numel()).view_as(values)
    return torch.autograd.grad((values * weights).sum(), list(model.parameters()))


def assert_exact(records, masks, chunk):
    plain, model = build(), build()
    logprobs = ResponseLogprobs(model, chunk_tokens=chunk, entropy_gradient=True)
    actual = torch.stack(logprobs(token_batch(records, masks)))
    pairs = zip(records, masks, strict=True)
    expected = torch.cat([whole_logprobs(plain, *pair) for pair in pairs], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    if actual.numel():
        found, wanted = gradients(model, actual), gradients(plain, expected)
        largest = max(float(gradient.abs().max()) for gradient in wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * largest)


@settings(max_examples=many(30), deadline=None)
@given(GROUPS, st.integers(1, 40))
def test_values_and_gradients_are_those_of_one_row_per_response(groups, chunk):
    assert_exact(*sequences(groups), chunk)


@given(GROUPS)
def test_each_prompt_is_in_the_column_once_and_nothing_after_the_last_wanted_token(groups):
    records, masks = sequences(groups)
    prompts = {record.prompt_ids.tobytes(): len(record.prompt_ids) for record in records}
    read = sum(int(max(np.flatnonzero(mask), default=0)) for mask in masks)
    batch = token_batch(records, masks)
    assert batch.tokens.shape == batch.input_pos.shape == (sum(prompts.values()) + read, 1)


@settings(max_examples=many(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2000)), min_size=1, max_size=40))
def test_attention_pads_the_pairs_of_large_rows_by_a_quarter(pairs):
    lengths = (3, 30, 300, 300, 1000, 4000)
    parts = [Part(prompt, lengths[prompt], response) for prompt, response in pairs]
    blocks = arrange(parts).layout.padded.blocks
    padded = sum(block.queries.numel() * block.keys.shape[1] for block in blocks)
    rows: dict[int, list[int]] = {}
    for prompt, response in pairs:
        rows.setdefault(prompt, []).extend([response] * (response > 0))
    exact = sum(lengths[p] ** 2 + sum(r * (lengths[p] + r) for r in rs) for p, rs in rows.items())
    assert padded <= 2 * exact + len(blocks) * 2**17


def test_a_sequence_beyond_the_models_positions_is_refused():
    logprobs, ids = ResponseLogprobs(build(), chunk_tokens=8), np.zeros(60, np.int64)
    with pytest.raises(ValueError, match=r"max_seq_len: a sequence of 65 tokens"):
        logprobs(token_batch([TokenSequence(ids, ids[:6], 1.0)]))
    assert len(logprobs(token_batch([TokenSequence(ids, ids[:5], 1.0)]))[0]) == 5


def test_attention_that_cannot_share_prompts_is_refused():
    model = gemma2(**SIZES, head_dim=16)
    with pytest.raises(ValueError, match=r"^model: attention by Gemma2Attention"):
        share_prompts(model)


def test_arrays_copied_together_keep_their_values_and_change_alone():
    arrays = [np.arange(3), np.array([True]), np.empty((0, 2)), np.ones((2, 3), np.float32)]
    copies = to_device(arrays, torch.device("cpu"))
    for copy, array in zip(copies, arrays, strict=True):
        assert copy.numpy().dtype == array.dtype
        np.testing.assert_array_equal(copy, array)
    loss = (copies[3] * torch.ones(3, requires_grad=True)).sum()
    copies[0] += 1  # not of the product, whose gradient needs the other copy
    loss.backward()
    assert arrays[0].tolist() == [0, 1, 2]

"""Logprobs of response tokens equal those from whole logits, whatever chunks and padding."""

import numpy as np
import pytest
import torch
from torchtune.models.qwen2 import qwen2

from grpo_components.training.logprobs import ResponseLogprobs, token_batch
from grpo_components.trajectory import Trajectory

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}


def build(tied=True):
    torch.manual_seed(0)
    return qwen2(
        vocab_size=50, intermediate_dim=48, max_seq_len=64, tie_word_embeddings=tied, **SIZES
    )


def make(prompt_length, mask):
    rng = np.random.default_rng(prompt_length)
    size = len(mask)
    return Trajectory(
        prompt_ids=rng.integers(0, 50, prompt_length),
        response_ids=rng.integers(0, 50, size),
        response_mask=np.array(mask, bool),
        generator_logprobs=np.zeros(size, np.float32),
        token_versions=np.zeros(size, np.int32),
        prompt_index=0,
        epoch=0,
        group_id=0,
        attempt=0,
        finish_reason="stop",
    )


RAGGED = [make(3, [True] * 5), make(7, [True, False, True]), make(1, [True] * 9)]


def from_whole_logits(model, trajectories, temperature, sampled_only):
    """One sequence at a time, no padding, all logits."""
    parts = []
    for t in trajectories:
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids]))
        logprobs = torch.log_softmax(model(ids[None])[0].float() / temperature, dim=-1)
        taken = logprobs[torch.arange(len(ids) - 1), ids[1:]][len(t.prompt_ids) - 1 :]
        parts.append(taken[torch.tensor(t.response_mask)] if sampled_only else taken)
    return torch.cat(parts)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("sampled_only", [True, False])
def test_values_and_gradients_equal_those_of_whole_logits(tied, chunk, sampled_only):
    expected_model, model = build(tied), build(tied)
    expected = from_whole_logits(expected_model, RAGGED, 0.7, sampled_only)
    expected.mean().backward()
    logprobs = ResponseLogprobs(model, temperature=0.7, chunk_tokens=chunk)
    actual = logprobs(token_batch(RAGGED, sampled_only))
    actual.mean().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    for (name, p), q in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    largest = 0
    original = torch.nn.functional.cross_entropy

    def spy(logits, *args, **kwargs):
        nonlocal largest
        largest = max(largest, logits.numel())
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", spy)
    logprobs = ResponseLogprobs(build(), temperature=1.0, chunk_tokens=2)
    assert len(logprobs(token_batch(RAGGED, sampled_only=True))) == 16
    assert largest == 2 * 50

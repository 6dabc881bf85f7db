"""Logprobs of response tokens: ids without a probability, and memory; rungs compare the rest."""

import numpy as np
import pytest
import torch
from lib.logprobs import whole_logprobs
from lib.policies import SIZES, random_weights
from lib.trajectories import trajectory as record
from torch.nn import functional
from torchtune.models.qwen2 import qwen2
from torchtune.modules import RMSNorm

from grpo_components.models.logprobs import ResponseLogprobs, fuse_norms, token_batch


def build():
    return random_weights(qwen2(**SIZES, tie_word_embeddings=True))


def make(prompt_length, mask):
    rng = np.random.default_rng(prompt_length)
    prompt, response = (rng.integers(0, 60, size) for size in (prompt_length, len(mask)))
    return record(response, mask, prompt_ids=prompt)


RAGGED = [make(3, [True] * 5), make(7, [True, False, True]), make(1, [True] * 9)]

MASKS = [t.response_mask for t in RAGGED]
for number, trajectory in enumerate(RAGGED):
    trajectory.temperature = 0.7 + 0.3 * number


def test_ids_that_are_never_sampled_have_no_probability():
    known = 1 + max(int(t.response_ids.max()) for t in RAGGED)
    assert known < 64, "some ids must be left out"
    model = build()
    whole = torch.cat([whole_logprobs(lambda ids: model(ids)[..., :known], t) for t in RAGGED], 1)
    shorter = ResponseLogprobs(model, chunk_tokens=4, num_ids=known)(token_batch(RAGGED))
    torch.testing.assert_close(torch.stack(shorter), whole, rtol=1e-5, atol=2e-5)


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    largest = 0
    original = torch.log_softmax

    def spy(logits, *args, **kwargs):
        nonlocal largest
        largest = max(largest, logits.numel())
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(torch, "log_softmax", spy)
    logprobs = ResponseLogprobs(build(), chunk_tokens=2)
    assert len(logprobs(token_batch(RAGGED, MASKS))[0]) == 16
    assert largest == 2 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_give_torchtunes_bits_and_get_one_dtype(monkeypatch, dtype):
    norm, x = RMSNorm(48, eps=1e-5), 3 * torch.randn(2, 5, 48)
    torch.nn.init.normal_(norm.scale, mean=1.0, std=0.3)
    (norm := norm.to(dtype)), (x := x.to(dtype).requires_grad_())
    seen, fused = [], functional.rms_norm

    def spy(x, shape, weight, eps):
        seen.append({x.dtype, weight.dtype})
        return fused(x, shape, weight, eps)

    def run():
        value = norm(x)
        return value, *torch.autograd.grad(value.float().pow(2).sum(), [x, norm.scale])

    expected = run()
    fuse_norms(norm)
    monkeypatch.setattr(functional, "rms_norm", spy)
    assert all(map(torch.equal, run(), expected))
    assert seen == [{dtype}]

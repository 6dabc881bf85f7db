"""Capped scores and sinks take bounded memory, whatever the lengths, and the same values."""

import pytest
import torch

from grpo_components.models import hugging_face_attention
from grpo_components.models.hugging_face_attention import explicit
from grpo_tools.memory_plan.live_bytes import counting


def attend(queries, keys, mask, softcap, sinks):
    """Output and gradients."""
    torch.manual_seed(0)
    given = [torch.randn(2, 4, n, 8, requires_grad=True) for n in (queries, keys, keys)]
    if sinks:
        given.append(torch.randn(4, requires_grad=True))
    found = explicit(*given[:3], mask, 0.5, softcap, given[3] if sinks else None)
    return [found, *torch.autograd.grad(found.pow(2).sum(), given)]


@pytest.mark.parametrize("softcap, sinks", [(1.0, False), (None, True)])
@pytest.mark.parametrize("scores", [1, 200, 1000])
def test_queries_in_turns_give_the_same_values_and_gradients(monkeypatch, scores, softcap, sinks):
    causal = torch.ones(1, 1, 9, 9).tril() > 0
    of_rows = torch.arange(11) <= torch.arange(6, 11)[:, None] - torch.arange(2).view(2, 1, 1, 1)
    for queries, keys, mask in ((9, 9, None), (9, 9, causal), (5, 11, of_rows)):
        monkeypatch.undo()
        expected = attend(queries, keys, mask, softcap, sinks)
        monkeypatch.setattr(hugging_face_attention, "_MAX_SCORES", scores)
        actual = attend(queries, keys, mask, softcap, sinks)
        for found, wanted in zip(actual, expected, strict=True):
            assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("rows, queries, keys", [(4, 8000, 8500), (2, 16000, 16500)])
def test_a_layer_with_long_responses_takes_a_few_gib(monkeypatch, rows, queries, keys):
    """Forward and backward of 16 heads, on tensors that have shapes only."""
    bounded = layer_gib(rows, queries, keys)
    monkeypatch.setattr(hugging_face_attention, "_MAX_SCORES", rows * 16 * queries * keys)
    whole = layer_gib(rows, queries, keys)
    assert bounded < 6 and whole > 50


def layer_gib(rows, queries, keys):
    options = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(rows, 16, n, 64, **options) for n in (queries, keys, keys))
    mask = torch.empty(rows, 1, queries, keys, dtype=torch.bool, device="meta")
    with counting() as live:
        explicit(q, k, v, mask, None, 30.0, torch.empty(16, **options)).sum().backward()
    return live.peak / 2**30

"""Attention with which transformers models compute each prompt once for all its responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grpo_components.models.shared_prompts import (
    Block,
    Layout,
    fits_flash,
    over_blocks,
    over_sequences,
)

NAME = "grpo_shared_prompts"
"""Name under which transformers knows `attention`."""
_MAX_SCORES = 1 << 28
"""Maximum number of attention scores (heads x queries x keys) in memory without a fused kernel:
4 GiB at 16 bytes each."""
_UNSUPPORTED = ("position_bias", "attention_bias", "alibi", "head_mask")


def register() -> None:
    """Add `attention` to transformers' attention implementations.

    No mask function is registered under `NAME`, so models make no mask: `attention` gets a `Layout`
    instead.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    longest: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a transformers model's attention over N tokens that contain each prompt once.

    Queries are [1, H, N, D], keys [1, K, N, D] and values [1, K, N, E], where K divides H. A query
    sees the keys that `layout` says, but only the last `sliding_window` of them, its own included.
    The longest sequence has `longest` tokens. As in Gemma 2, a `softcap` c turns scores s into
    c * tanh(s / c). As in gpt-oss, `s_aux` [H] are the scores of attention sinks (keys without a
    value).
    """
    if layout is None:
        name = type(module).__name__
        raise ValueError(f"{name} does not get the keyword arguments of the model's forward pass")
    refuse_unsupported(module, attention_mask, others)
    window = sliding_window if sliding_window and sliding_window < longest else None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    is_plain = softcap is None and s_aux is None
    if layout.ragged is not None and is_plain and fits_flash(q, v):
        return over_sequences(q, k, v, layout.ragged, scaling, window)[None], None

    def of_block(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        mask = block.mask if window is None else _windowed(block, layout.positions, window)
        k, v = (for_all_heads(x, q.shape[1] // x.shape[1]) for x in (k, v))
        if is_plain:
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        return explicit(q, k, v, mask, scaling, softcap, s_aux)

    return over_blocks(of_block, q, k, v, layout.padded)[None], None


def refuse_unsupported(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    """Raise a ValueError if attention has its own mask, a bias or dropout, or is not causal."""
    name = type(module).__name__
    for argument in _UNSUPPORTED:
        if others.get(argument) is not None:
            raise ValueError(f"{name} has {argument}, which shared prompts do not support")
    if mask is not None or others.get("is_causal") is False:
        raise ValueError(f"{name} has a mask of its own, so that it is not plainly causal")
    if others.get("dropout"):
        raise ValueError(f"{name} has attention dropout, which generators lack")


def for_all_heads(x: Tensor, queries_per_key: int) -> Tensor:
    """Repeat the K heads of keys or values [n, K, T, D], one for each query head: [n, H, T, D]."""
    if queries_per_key == 1:
        return x
    return x[:, :, None].expand(-1, -1, queries_per_key, -1, -1).flatten(1, 2)


def _windowed(block: Block, positions: Tensor, window: int) -> Tensor:
    """Return a block's mask that also hides keys `window` or more tokens before the query."""
    if block.mask is not None:
        asks, seen = positions[block.queries], positions[block.keys]
        return block.mask & (seen[:, None, None, :] > (asks - window)[:, None, :, None])
    order = torch.arange(block.queries.shape[1], device=positions.device)
    # Padding has index 0, so positions would be wrong here: the mask uses the order in the row.
    seen, asks = order[None, :], order[:, None]
    return ((seen <= asks) & (seen > asks - window))[None, None]


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with capped scores or attention sinks, which torch's fused kernels lack.

    With more than `_MAX_SCORES` scores, it computes the queries in parts, and the backward pass
    recomputes the scores, so that they need less memory.
    """

    def of_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return weights[..., : k.shape[2]] @ v

    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    width = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    if width >= q.shape[2]:
        return of_queries(q, k, v, mask)
    again = partial(checkpoint, of_queries, use_reentrant=False, preserve_rng_state=False)
    run = cast(Callable[..., Tensor], again if torch.is_grad_enabled() else of_queries)
    parts = zip(q.split(width, 2), mask.split(width, -2), strict=True)
    return torch.cat([run(part, k, v, seen) for part, seen in parts], dim=2)

"""Packs sequences into one row, in which each sequence attends only to itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

_BLOCK = 128
"""Block size of flex attention, in queries and keys."""


def row_width(tokens_per_micro_batch: int) -> int:
    """Return the width of every packed row: the token budget rounded up to whole blocks.

    All rows have the same width, because flex attention is recompiled for each new width.

    Args:
        tokens_per_micro_batch: largest number of tokens in a row.
    """
    return -(-tokens_per_micro_batch // _BLOCK) * _BLOCK


def row_layout(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the positions and sequence numbers of the tokens in a packed row.

    Args:
        lengths: number of tokens of each sequence, in the row's order; at most `width` in total.
        width: width of the row.

    Returns:
        Positions [1, width] int64 of each token in its own sequence, and sequence numbers
        [1, width] int64. The rest of the row is padding.
    """
    padding = width - sum(lengths)
    # Each padding token is a sequence of its own: a query without any key would give NaN.
    parts = [*lengths, *([1] * padding)]
    positions = torch.cat([torch.arange(length) for length in parts])
    numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))
    return positions[None], numbers[None]


def document_mask(numbers: Tensor) -> BlockMask | Tensor:
    """Return the causal attention mask that keeps each sequence to itself.

    Args:
        numbers: [B, W] int64, the sequence number of each token.

    Returns:
        On a GPU a block mask, so that torchtune uses flex attention and skips empty blocks.
        Elsewhere a mask [B, W, W] bool, because flex attention has no backward pass there.
    """
    if numbers.is_cuda:
        return block_mask(numbers)
    width = numbers.shape[1]
    same = numbers[:, :, None] == numbers[:, None, :]
    return same & torch.ones(width, width, dtype=torch.bool, device=numbers.device).tril()


def block_mask(numbers: Tensor) -> BlockMask:
    """Return the mask of `document_mask` for flex attention, on the device of the numbers.

    torchtune's `packed_block_causal_mask` would always use the default GPU.

    Args:
        numbers: [B, W] int64, the sequence number of each token.
    """

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[b, query] == numbers[b, key])

    batch, width = numbers.shape
    return create_block_mask(sees, batch, None, width, width, device=str(numbers.device))

"""Trajectories one after the other in a single row, each of which sees only itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

_BLOCK = 128
"""Flex attention works on blocks of so many queries and keys."""


def row_width(tokens_per_micro_batch: int) -> int:
    """Width of every packed row: the token budget in whole blocks.

    One width for all, because flex attention is compiled anew for each.

    Args:
        tokens_per_micro_batch: tokens in a row at most.
    """
    return -(-tokens_per_micro_batch // _BLOCK) * _BLOCK


def row_layout(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Who sits where in a packed row.

    Args:
        lengths: tokens of each sequence, in their order in the row; at most `width` together.
        width: of the row.

    Returns:
        Positions [1, width] int64 of each token in its own sequence, and numbers [1, width] int64
        of the sequences. What is left at the end is padding.
    """
    padding = width - sum(lengths)
    # Each padding token is alone: it costs one key, and no query is left without any (a NaN).
    parts = [*lengths, *([1] * padding)]
    positions = torch.cat([torch.arange(length) for length in parts])
    numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))
    return positions[None], numbers[None]


def document_mask(numbers: Tensor) -> BlockMask | Tensor:
    """Which keys a query sees: those of its own sequence that are not later.

    Args:
        numbers: [B, W] int64, of the sequences.

    Returns:
        A block mask on a GPU, for which torchtune calls flex attention (it skips the blocks that
        nobody sees); elsewhere, where flex attention has no backward, a mask [B, W, W] bool.
    """
    if numbers.is_cuda:
        return block_mask(numbers)
    width = numbers.shape[1]
    same = numbers[:, :, None] == numbers[:, None, :]
    return same & torch.ones(width, width, dtype=torch.bool, device=numbers.device).tril()


def block_mask(numbers: Tensor) -> BlockMask:
    """The same as flex attention has it, on the device of the numbers.

    torchtune's `packed_block_causal_mask` puts it on "cuda", whichever GPU that is.

    Args:
        numbers: [B, W] int64, of the sequences.
    """

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[b, query] == numbers[b, key])

    batch, width = numbers.shape
    return create_block_mask(sees, batch, None, width, width, device=str(numbers.device))

"""Computes a prompt once for all responses to it, and pads nothing but attention.

    four responses to two prompts      one column of N tokens, with each prompt once
        a a a | r r                        a a a  r r  s  t t  b b u u
        a a a | s
        a a a | t t                    attention, by blocks of rows:   queries   keys
        b b   | u u                        trunks, causal               a a a    a a a
                                           (with the only response)     b b u u  b b u u
                                           branches: see their prompt   s r r    a a a s r r
                                           and themselves alone         t t      a a a t t

Only attention mixes tokens; all other layers compute the column as it is. The positions of each
response go on from its prompt's last one, which predicts the response's first token. Autograd adds
up what the responses do to their prompt, so loss and gradient are those of one row per response.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchtune.modules import MultiHeadAttention

from grpo_components.errors import ConfigError

CPU = torch.device("cpu")
_CHEAP_PAIRS = 1 << 16
"""Padding of a block, in query-key pairs, that costs less than one more call of attention."""

Tokens = NDArray[np.int64]
"""Indices of tokens in the column."""
Row = tuple[Tokens, Tokens]
"""Queries, and the keys that they may see."""


class Part(NamedTuple):
    """What a forward pass reads of one response and its prompt."""

    prompt: Hashable
    """Equal for responses to the same prompt."""
    prompt_tokens: int
    response_tokens: int
    """Tokens before the last one whose logprob is wanted: the others predict nothing."""


class Block(NamedTuple):
    """Rows that attention computes in one call, padded to the same widths."""

    queries: Tensor
    """[n, Q] int64: indices of tokens; padding is 0, and nobody reads its output."""
    keys: Tensor
    """[n, K] int64."""
    mask: Tensor | None
    """[n, 1, Q, K] bool, True where a query sees a key; None is causal, with the queries as keys.
    """


class Layout(NamedTuple):
    """How attention reads the column of tokens; a torchtune decoder gets it as its mask."""

    blocks: tuple[Block, ...]
    places: Tensor
    """[N] int64: index of each token in the outputs of all blocks, one after the other."""
    positions: Tensor
    """[N] int64: position of each token in its sequence."""


class Column(NamedTuple):
    """Places of prompts and responses in the column of tokens."""

    prompts: list[Tokens]
    """Tokens of each response's prompt; the same array for responses that share one."""
    responses: list[Tokens]
    """Tokens of each response."""
    positions: Tensor
    """[N] int64: position of each token in its sequence."""
    layout: Layout


def arrange(parts: Sequence[Part], device: torch.device = CPU) -> Column:
    """Place prompts and responses in a column of tokens, each prompt once."""
    siblings: dict[Hashable, list[int]] = {}
    for number, part in enumerate(parts):
        siblings.setdefault(part.prompt, []).append(number)
    prompts: list[Tokens] = [np.empty(0, np.int64)] * len(parts)
    responses = list(prompts)
    trunks: list[Row] = []
    branches: list[Row] = []
    end = 0
    for members in siblings.values():
        trunk = np.arange(end, end + parts[members[0]].prompt_tokens)
        end += len(trunk)
        for number in members:
            prompts[number] = trunk
            responses[number] = np.arange(end, end + parts[number].response_tokens)
            end += parts[number].response_tokens
        read = [responses[number] for number in members if len(responses[number])]
        if len(read) == 1:
            trunk = np.concatenate([trunk, *read])
        else:
            branches += [(run, np.concatenate([trunk, run])) for run in _runs(read, len(trunk))]
        trunks.append((trunk, trunk))
    positions, owners = np.empty(end, np.int64), np.zeros(end, np.int64)
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True), start=1):
        positions[prompt] = np.arange(len(prompt))
        positions[response] = np.arange(len(prompt), len(prompt) + len(response))
        owners[response] = number  # tokens of a prompt stay 0: all responses see them
    on_device = [torch.from_numpy(column).to(device) for column in (positions, owners)]
    layout = _layout([*_alike(trunks)], [*_alike(branches)], *on_device)
    return Column(prompts, responses, on_device[0], layout)


def _runs(responses: list[Tokens], prompt_tokens: int) -> Iterator[Tokens]:
    """Join short responses to one prompt into rows, so that its keys are not copied for each.

    A run of several is at most half as long as the prompt. So a row computes at most 1.5 times the
    pairs of its responses, and R tokens of siblings have at most 5 R + P keys.
    """
    run: list[Tokens] = []
    for response in sorted(responses, key=len):
        if run and sum(map(len, run)) + len(response) > prompt_tokens // 2:
            yield np.concatenate(run)
            run = []
        run.append(response)
    if run:
        yield np.concatenate(run)


def _alike(rows: list[Row]) -> Iterator[list[Row]]:
    """Group rows of similar size: padding at most doubles the query-key pairs of a large group."""
    group: list[Row] = []
    pairs = longest = 0
    for row in sorted(rows, key=lambda row: (len(row[0]), len(row[1]))):
        queries, keys = len(row[0]), len(row[1])  # no row before has more queries
        padded = (len(group) + 1) * queries * max(longest, keys)
        exact = pairs + queries * keys
        if group and padded > max(2 * exact, exact + _CHEAP_PAIRS):
            yield group
            group, exact, longest = [], queries * keys, 0
        group.append(row)
        pairs, longest = exact, max(longest, keys)
    if group:
        yield group


def _layout(
    trunks: list[list[Row]], branches: list[list[Row]], positions: Tensor, owners: Tensor
) -> Layout:
    """Turn groups of causal rows, and of rows that see their prompt and themselves, into blocks.

    Tokens have positions [N] and owners [N]: the number of their response, 0 in a prompt.
    """
    blocks: list[Block] = []
    places, outputs = np.empty(len(positions), np.int64), 0
    for group in [*trunks, *branches]:
        padded = [_padded([row[side] for row in group]) for side in (0, 1)]
        real, (n, width) = padded[0] >= 0, padded[0].shape
        places[padded[0][real]] = np.arange(outputs, outputs + n * width).reshape(n, width)[real]
        outputs += n * width
        queries, keys = (torch.from_numpy(rows).to(positions.device) for rows in padded)
        exists, queries, keys = keys >= 0, queries.clamp(min=0), keys.clamp(min=0)
        mask = None
        if len(blocks) >= len(trunks):
            asks, seen = queries[:, :, None], keys[:, None, :]
            mask = (owners[seen] == 0) | (owners[seen] == owners[asks])
            # Padding asks as the first token, which sees its row's first, so that nothing is NaN.
            mask = (mask & (positions[seen] <= positions[asks]) & exists[:, None, :])[:, None]
        blocks.append(Block(queries, keys, mask))
    return Layout(tuple(blocks), torch.from_numpy(places).to(positions.device), positions)


def _padded(rows: list[Tokens]) -> Tokens:
    """Stack rows of tokens, [n, width]; padding is -1."""
    stacked = np.full((len(rows), max(map(len, rows))), -1)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked


def share_prompts(model: nn.Module) -> None:
    """Let a torchtune decoder's attention understand a `Layout` in place of a mask."""
    for layer in cast(Any, model).layers:
        attention = layer.attn
        if type(attention) is not MultiHeadAttention or not attention.is_causal:
            problem = f"attention by {type(attention).__name__}, which cannot share prompts"
            raise ConfigError("model", problem, "torchtune's causal MultiHeadAttention")
        attention._attention_call = attend


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Layout, dropout_p: float, is_causal: bool
) -> Tensor:
    """Compute attention [N, H, 1, D] over a column, as torchtune calls it; the layout is causal."""

    def plain(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=block.mask, dropout_p=dropout_p, is_causal=block.mask is None
        )

    return over_blocks(plain, q.squeeze(2), k.squeeze(2), v.squeeze(2), mask).unsqueeze(2)


def over_blocks(
    attention: Callable[[Tensor, Tensor, Tensor, Block], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
) -> Tensor:
    """Compute attention block by block, and put the outputs [N, H, E] in the column's order.

    Queries are [N, H, D]; keys [N, K', D] and values [N, K', E] may have fewer heads K'. The
    function gets those of one block, [n, heads, tokens, D or E], and the block.
    """

    def rows(x: Tensor, tokens: Tensor) -> Tensor:
        # An embedding is the gather whose backward is fast on a CPU, and deterministic on CUDA.
        heads = functional.embedding(tokens, x.flatten(1)).unflatten(2, (x.shape[1], -1))
        return heads.transpose(1, 2)

    outputs = [
        attention(rows(q, block.queries), rows(k, block.keys), rows(v, block.keys), block)
        for block in layout.blocks
    ]
    flat = torch.cat([output.transpose(1, 2).flatten(2).flatten(0, 1) for output in outputs])
    return functional.embedding(layout.places, flat).unflatten(1, (q.shape[1], -1))

"""Computes each prompt once for all responses to it, and pads tokens only inside attention.

    four responses to two prompts      one column of N tokens, with each prompt once
        a a a | r r                        a a a  r r  s  t t  b b u u
        a a a | s
        a a a | t t                    attention, by blocks of rows:   queries   keys
        b b   | u u                        trunks (prompts), causal     a a a    a a a
                                           (with a single response)     b b u u  b b u u
                                           branches (responses): see    s r r    a a a s r r
                                           only prompt and themselves   t t      a a a t t

Only attention mixes tokens; all other layers process the column as it is. Positions continue from
a prompt to each response, and the prompt's last token predicts each response's first. Autograd adds
up the gradients of all responses in their prompt. So loss and gradient are the same as with one row
per response.

On a GPU, one call of flash attention replaces the blocks. Its sequences are prompts and responses
of different lengths; the keys of a response are its prompt and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torchtune.modules import MultiHeadAttention

from grpo_components.errors import ConfigError

CPU = torch.device("cpu")
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_PINNED_FOR = ("cuda",)
"""Devices that need pinned memory, so that a copy to them does not wait for their queued work."""
_CHEAP_PAIRS = 1 << 16
"""Padding of a block, in query-key pairs, that costs less than one more call of attention."""

Tokens = NDArray[np.int64]
"""Indices of tokens in the column: the N tokens of a forward pass, each prompt once."""
Row = tuple[Tokens, Tokens]
"""Indices of queries, and of the keys that they may see."""
Group = tuple[Tokens, list[Tokens]]
"""A prompt and its responses. A single response is instead appended to the prompt; then the list is
empty."""


class Part(NamedTuple):
    """Tells how many tokens a forward pass reads of one response and its prompt."""

    prompt: Hashable
    """Key of the prompt, equal for all responses to it."""
    prompt_tokens: int
    response_tokens: int
    """Number of response tokens read: all before the last one whose logprob is wanted."""


class Block(NamedTuple):
    """Rows that one call of attention computes, padded to the same lengths."""

    queries: Tensor
    """[n, Q] int64: indices of tokens; padding is 0, and its output is not read."""
    keys: Tensor
    """[n, K] int64: indices of tokens; padding is 0, and no token attends to it."""
    mask: Tensor | None
    """[n, 1, Q, K] bool, True where a query sees a key. None: causal, and keys equal queries."""


class Padded(NamedTuple):
    """The N tokens as padded blocks; each token is a query in exactly one block."""

    blocks: tuple[Block, ...]
    places: Tensor
    """[N] int64: index of each token's output in the outputs of all blocks, laid end to end."""


class Ragged(NamedTuple):
    """The N tokens as sequences of different lengths; a sequence's last query sees all its keys."""

    keys: Tensor
    """[K] int64: indices of the keys of all sequences. The queries are the N tokens in order."""
    query_ends: Tensor
    """[S + 1] int32: 0, and where the queries of each of the S sequences end."""
    key_ends: Tensor
    """[S + 1] int32: the same for keys."""
    most_queries: int
    most_keys: int


class Layout:
    """Tells attention which tokens see each other; a torchtune decoder gets it as its mask."""

    def __init__(self, groups: list[Group], positions: Tokens, device: torch.device) -> None:
        self._groups, self._padded = groups, None
        self.ragged: Ragged | None = None
        """The tokens as flash attention reads them; None if the device does not support it."""
        self.positions: Tensor
        """[N] int64: position of each token in its sequence."""
        if has_flash(device):
            self.positions, self.ragged = _ragged(groups, positions, device)
        else:
            (self.positions,) = to_device([positions], device)
            _ = self.padded  # now, because `_pad` would split a compiled layer

    @property
    def padded(self) -> Padded:
        """The tokens as blocks, for attention that flash attention cannot compute."""
        if self._padded is None:
            self._padded = _pad(self._groups, self.positions)  # pyright: ignore
        return self._padded


class Column(NamedTuple):
    """Tells where prompts and responses are among the N tokens of a forward pass."""

    prompts: list[Tokens]
    """For each response, the indices of its prompt; one array for all responses to a prompt."""
    responses: list[Tokens]
    """For each response, the indices of its tokens."""
    layout: Layout


def arrange(parts: Sequence[Part], device: torch.device = CPU) -> Column:
    """Lay prompts and responses end to end for one forward pass, each prompt once."""
    siblings: dict[Hashable, list[int]] = {}
    for number, part in enumerate(parts):
        siblings.setdefault(part.prompt, []).append(number)
    prompts: list[Tokens] = [np.empty(0, np.int64)] * len(parts)
    responses = list(prompts)
    groups: list[Group] = []
    end = 0
    for members in siblings.values():
        trunk = np.arange(end, end + parts[members[0]].prompt_tokens)
        end += len(trunk)
        for number in members:
            prompts[number] = trunk
            responses[number] = np.arange(end, end + parts[number].response_tokens)
            end += parts[number].response_tokens
        read = [responses[number] for number in members if len(responses[number])]
        groups.append((np.concatenate([trunk, *read]), []) if len(read) == 1 else (trunk, read))
    positions = np.empty(end, np.int64)
    for prompt, response in zip(prompts, responses, strict=True):
        positions[prompt] = np.arange(len(prompt))
        positions[response] = np.arange(len(prompt), len(prompt) + len(response))
    return Column(prompts, responses, Layout(groups, positions, device))


def has_flash(device: torch.device) -> bool:
    """Whether flash attention runs on a device."""
    is_built = torch.backends.cuda.is_flash_attention_available()
    return device.type == "cuda" and is_built and torch.cuda.get_device_capability(device) >= (8, 0)


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in a single copy, without waiting for it."""
    tensors = [torch.from_numpy(array) for array in arrays]
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]  # each starts where any dtype may
    is_pinned = device.type in _PINNED_FOR
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)

    def parts(buffer: Tensor) -> list[Tensor]:
        found = zip(buffer.split(sizes), tensors, strict=True)
        return [part[: like.nbytes].view(like.dtype).view(like.shape) for part, like in found]

    for part, tensor in zip(parts(buffer), tensors, strict=True):
        part.copy_(tensor)
    # As `data`, each has its own version for autograd, so that a loss may change one in place.
    return [part.data for part in parts(buffer.to(device, non_blocking=True))]


def _ragged(groups: list[Group], positions: Tokens, device: torch.device) -> tuple[Tensor, Ragged]:
    """Return the positions on the device, and the groups as sequences for flash attention."""
    queries, keys = list[Tokens](), list[Tokens]()
    for trunk, responses in groups:
        queries += [trunk, *responses]
        keys += [trunk, *(np.concatenate([trunk, response]) for response in responses)]
    lengths = [[len(row) for row in rows] for rows in (queries, keys)]
    ends = [np.cumsum([0, *each], dtype=np.int32) for each in lengths]
    arrays = [positions, np.concatenate(keys), *ends]
    on_device, places, query_ends, key_ends = to_device(arrays, device)
    return on_device, Ragged(places, query_ends, key_ends, max(lengths[0]), max(lengths[1]))


def _runs(responses: list[Tokens], prompt_tokens: int) -> Iterator[Tokens]:
    """Join short responses to one prompt into rows, so that fewer rows copy the prompt's keys.

    With P prompt tokens, a row of several responses has at most P/2 tokens: the masked pairs of
    different responses add at most half to its query-key pairs. Two rows in sequence have more than
    P/2 together: so all rows, with R tokens in total, have at most 5 R + P keys.
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
    """Group rows of similar size: padding adds at most 25% of pairs, or `_CHEAP_PAIRS` if more."""
    group: list[Row] = []
    pairs = longest = 0
    for row in sorted(rows, key=lambda row: (len(row[0]), len(row[1]))):
        queries, keys = len(row[0]), len(row[1])  # no row before has more queries
        padded = (len(group) + 1) * queries * max(longest, keys)
        exact = pairs + queries * keys
        if group and padded > exact + max(exact // 4, _CHEAP_PAIRS):
            yield group
            group, exact, longest = [], queries * keys, 0
        group.append(row)
        pairs, longest = exact, max(longest, keys)
    if group:
        yield group


@torch.compiler.disable  # torch.compile cannot trace it
def _pad(groups: list[Group], positions: Tensor) -> Padded:
    """Build padded blocks: causal prompts, and responses that see their prompt and themselves."""
    trunks = [*_alike([(trunk, trunk) for trunk, _ in groups])]
    runs = [(trunk, run) for trunk, read in groups for run in _runs(read, len(trunk))]
    branches = [*_alike([(run, np.concatenate([trunk, run])) for trunk, run in runs])]
    places, outputs = np.empty(len(positions), np.int64), 0
    numbers = np.zeros(len(positions), np.int64)
    for number, response in enumerate((each for _, read in groups for each in read), start=1):
        numbers[response] = number  # tokens of a prompt stay 0: all responses see them
    device = positions.device
    (owners,) = to_device([numbers], device)
    blocks: list[Block] = []
    for group in [*trunks, *branches]:
        padded = [_stacked([row[side] for row in group]) for side in (0, 1)]
        real, (n, width) = padded[0] >= 0, padded[0].shape
        places[padded[0][real]] = np.arange(outputs, outputs + n * width).reshape(n, width)[real]
        outputs += n * width
        queries, keys = to_device(padded, device)
        exists, queries, keys = keys >= 0, queries.clamp(min=0), keys.clamp(min=0)
        mask = None
        if len(blocks) >= len(trunks):
            asks, seen = queries[:, :, None], keys[:, None, :]
            mask = (owners[seen] == 0) | (owners[seen] == owners[asks])
            # A padding query is token 0 and sees its row's first key, so that no output is NaN.
            mask = (mask & (positions[seen] <= positions[asks]) & exists[:, None, :])[:, None]
        blocks.append(Block(queries, keys, mask))
    return Padded(tuple(blocks), *to_device([places], device))


def _stacked(rows: list[Tokens]) -> Tokens:
    """Stack rows of tokens, [n, width]; padding is -1."""
    stacked = np.full((len(rows), max(map(len, rows))), -1)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked


def share_prompts(model: nn.Module) -> None:
    """Make a torchtune decoder compute a prompt once: `attend` reads a `Layout` as its mask."""
    for layer in cast(Any, model).layers:
        attention = layer.attn
        if type(attention) is not MultiHeadAttention or not attention.is_causal:
            problem = f"attention by {type(attention).__name__}, which cannot share prompts"
            raise ConfigError("model", problem, "torchtune's causal MultiHeadAttention")
        repeats = attention.num_heads // attention.num_kv_heads
        attention._attention_call = partial(attend, repeats=repeats)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Layout,
    dropout_p: float,
    is_causal: bool,
    repeats: int = 1,
) -> Tensor:
    """Compute the attention of N tokens, [N, H, 1, D], in place of torchtune's function.

    `mask` is always causal, so `is_causal` is not read. torchtune passes each head of `k` and `v`
    `repeats` times.
    """
    q, k, v = (x.squeeze(2) for x in (q, k, v))
    if mask.ragged is not None and not dropout_p and fits_flash(q, v):
        return over_sequences(q, k[:, ::repeats], v[:, ::repeats], mask.ragged).unsqueeze(2)

    def plain(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=block.mask, dropout_p=dropout_p, is_causal=block.mask is None
        )

    return over_blocks(plain, q, k, v, mask.padded).unsqueeze(2)


def fits_flash(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention supports the dtype and head sizes of queries and values."""
    size = q.shape[-1]
    return q.dtype in _FLASH_DTYPES and size == v.shape[-1] <= 256 and size % 8 == 0


def over_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ragged: Ragged,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute attention by one call of flash attention; return its outputs [N, H, D].

    Queries are [N, H, D]; keys and values [N, K, D] may have fewer heads K. A query sees at most
    `window` keys, its own included.
    """
    keys, values = (_gathered(x, ragged.keys) for x in (k, v))
    found = varlen_attn(
        q,
        keys,
        values,
        *ragged[1:],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return cast(Tensor, found)


def over_blocks(
    attention: Callable[[Tensor, Tensor, Tensor, Block], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded: Padded,
) -> Tensor:
    """Compute attention block by block; return the outputs [N, H, E] in the order of the tokens.

    Queries are [N, H, D]; keys [N, K', D] and values [N, K', E] may have fewer heads K'.
    `attention` gets a block's queries, keys and values, [n, heads, tokens, D or E], and the block.
    """

    def rows(x: Tensor, tokens: Tensor) -> Tensor:
        return _gathered(x, tokens).transpose(1, 2)

    outputs = [
        attention(rows(q, block.queries), rows(k, block.keys), rows(v, block.keys), block)
        for block in padded.blocks
    ]
    flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return _gathered(flat, padded.places)


def _gathered(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of x [N, heads, D] at the indices `tokens`, as [..., heads, D]."""
    # An embedding is the gather whose backward is fast on a CPU, and deterministic on CUDA.
    return functional.embedding(tokens, x.flatten(1)).unflatten(-1, (x.shape[1], -1))

"""Runs transformers as the engine's backend: for small models, and where vLLM does not run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_components.exchange.weight_probe import ProbeReading
from grpo_components.exchange.weights import (
    checkpoint_tensors,
    hash_layers,
    hash_named,
    keeps_values,
)
from grpo_components.models.hugging_face_attention import (
    explicit,
    for_all_heads,
    refuse_unsupported,
)
from grpo_components.models.hugging_face_policy import base_of, logits_of
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.rollout.samples import BASE_VERSION, Completion, Request, Result
from grpo_components.settings import GeneratorSettings

NAME = "grpo_slots"
"""Name of the attention function among transformers' attention implementations."""
_PROMPT_TOKENS = 8192
"""Maximum tokens, with padding, in a forward pass over prompts; a longer prompt runs alone."""
_BLOCK = 16
"""The numbers of sequences and of keys in a pass are padded to a multiple of this. Otherwise, even
in one thread, the last bits of a logprob would depend on which other sequences are running."""


@dataclass
class _Sequence:
    """A request that has a slot (room in the KV cache), or waits for one."""

    request_id: str
    request: Request
    ids: list[int]
    """Prompt and sampled tokens."""
    longest: int
    """Length, in tokens with the prompt, at which the sequence ends."""
    stops: set[int]
    random: random.Random
    slot: int = -1
    is_begun: bool = False
    """Whether the keys and values of all tokens but the last are in the slot."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, token: int, logprob: float, version: int) -> Completion | None:
        """Append a token; return the completion if the token is the last one."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        start, watch = len(self.request.prompt_ids), self.request.watch
        reason: Literal["stop", "length"] = "stop"
        if token not in self.stops:
            if len(self.ids) == self.longest:
                reason = "length"
            elif watch is None or not watch(self.ids[start:]):
                return None
        return Completion(
            np.array(self.ids[start:], np.int64),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            reason,
        )


class TransformersBackend:
    """Samples with transformers, with methods as in `VLLMBackend`.

    Each running sequence has a slot in the KV cache. The prompt of a group is computed once if its
    requests begin together; there is no further prefix cache.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        options: EngineOptions,
        seed: int,
        expected_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        AttentionInterface.register(NAME, _attention)
        self._how: dict[str, Any] = {
            "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
            "attn_implementation": NAME,
            "local_files_only": True,
        }
        path, self._device = options.model_path, options.device
        logging.disable_progress_bar()  # each load of weights would show one
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, **self._how)
        self._model.to(self._device).eval()
        text, found = self._model.config.get_text_config(), self._model.generation_config
        self.max_model_len = settings.max_model_len or text.max_position_embeddings
        ends = found.eos_token_id  # vLLM stops at these, too, without being asked
        self._ends = set(ends if isinstance(ends, list) else () if ends is None else (ends,))
        self._num_ids, self._recompute_kv = options.num_ids, options.recompute_kv_after_pull
        slots = settings.max_num_seqs
        if settings.kv_cache_gib is not None:
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            values = 2 * text.num_hidden_layers * heads * size * self.max_model_len
            fits = settings.kv_cache_gib * 2**30 / (values * self._model.dtype.itemsize)
            slots = max(1, min(slots, int(fits)))
        self._cache: dict[int, list[Tensor]] = {}
        """Keys and values of each layer, [slots, heads, positions, D]; made by the first pass.

        A CPU allocates memory at the first write, so short sequences take little."""
        self._size = slots + 1, _padded(self.max_model_len)
        """Number of slots, one of which is never used, and number of positions in each."""
        self._free = list(range(slots))[::-1]
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._probes: list[tuple[str, list[int]]] = []
        self._version = BASE_VERSION
        self._layers: dict[str, int] | None = None
        read = checkpoint_tensors(Path(path), expected_shapes)
        self._keeps_values = keeps_values(self._hash, self._device, read, self._model.dtype)

    def add(self, request_id: str, request: Request) -> None:
        """Begin a request; raises a ValueError if it cannot be answered."""
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1 or not request.prompt_ids:
            size = f"the prompt has {len(request.prompt_ids)} tokens"
            raise ValueError(f"{size}; allowed: 1 to {self.max_model_len - 1}")
        longest = len(request.prompt_ids) + min(request.max_tokens, room)
        stops = self._ends | {*request.stop_token_ids}
        ids, draws = list(request.prompt_ids), random.Random(request.seed)
        self._waiting.append(_Sequence(request_id, request, ids, longest, stops, draws))

    def add_probe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Queue the weight probe (test tokens, see weight_probe.py) ahead of waiting requests."""
        self._probes.append((request_id, list(token_ids)))

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Result]]:
        """Sample a token for each running request; return (id, result) of all that finished."""
        results: list[tuple[str, Result]] = [(name, self._read(ids)) for name, ids in self._probes]
        self._probes = []
        while self._free and self._waiting:
            sequence = self._waiting.pop(0)
            sequence.slot = self._free.pop()
            self._running.append(sequence)
        going_on = [each for each in self._running if each.is_begun]
        for part in _parts([each for each in self._running if not each.is_begun]):
            results += self._sample(part, self._begin(part))
        if going_on:
            results += self._sample(going_on, self._go_on(going_on))
        if results:
            self._running = [each for each in self._running if each.slot >= 0]
        return results

    def finish_batches(self) -> list[tuple[str, Result]]:
        """Do nothing: no step leaves a batch unfinished."""
        return []

    def load(self, version: int, weights: Any) -> None:
        """Replace the weights; if the config says so, running sequences compute their KV again."""
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        how = {"state_dict": copies, "output_loading_info": True, **self._how}
        built, found = type(self._model).from_pretrained(None, config=self._model.config, **how)
        for what, names in found.items():
            if names:
                raise RuntimeError(f"transformers has {what.replace('_', ' ')}: {sorted(names)}")
        self._model, self._version = built.to(self._device).eval(), version
        self._layers = self._hash() if self._keeps_values else None
        if self._recompute_kv:
            for sequence in self._running:
                sequence.is_begun = False

    def abort(self, request_ids: list[str]) -> None:
        """Drop all requests."""
        self._free += [sequence.slot for sequence in self._running]
        self._running, self._waiting, self._probes = [], [], []

    def sleep(self) -> None:
        """Do nothing: preflight refuses to run this backend on a GPU that trainers share."""

    def failure(self, error: BaseException) -> str:
        """Return an empty text: every error already says its cause."""
        return ""

    def close(self) -> None:
        """Free the model and the slots."""
        del self._model, self._cache

    def _read(self, ids: list[int]) -> ProbeReading:
        positions = torch.arange(len(ids), device=self._device)
        hidden = self._compute([ids], positions[None], len(ids), lambda kept, new: new)
        found = self._logits(hidden[0]).log_softmax(-1)
        of_ids = found[:-1].gather(1, self._tensor(ids[1:])[:, None])[:, 0]
        return ProbeReading(of_ids.tolist(), self._version, 0, self._layers)

    def _hash(self) -> dict[str, int]:
        return hash_layers(hash_named(self._model.named_parameters()))

    def _begin(self, sequences: list[_Sequence]) -> Tensor:
        """Compute the KV cache of sequences, equal ones once; return next-token logits [N, V]."""
        rows: dict[tuple[int, ...], int] = {}
        sources = self._tensor([rows.setdefault(tuple(s.ids), len(rows)) for s in sequences])
        slots = self._tensor([s.slot for s in sequences])

        def store(kept: Tensor, new: Tensor) -> Tensor:
            kept[slots, :, : new.shape[2]] = new[sources]
            return new

        longest = _padded(max(map(len, rows)))
        padded = [[*ids, *[0] * (longest - len(ids))] for ids in rows]
        positions = torch.arange(longest, device=self._device)
        hidden = self._compute(padded, positions[None], longest, store)
        ends = [len(ids) - 1 for ids in rows]
        extra = [0] * (_padded(len(rows)) - len(rows))
        last = hidden[[*range(len(rows)), *extra], [*ends, *extra]]
        return self._logits(last)[sources]

    def _go_on(self, sequences: list[_Sequence]) -> Tensor:
        """Return next-token logits [N, V] of sequences whose slots hold all tokens but the last."""
        rows = [(s.slot, len(s.ids) - 1, s.ids[-1]) for s in sequences]
        rows += [(self._size[0] - 1, 0, 0)] * (_padded(len(rows)) - len(rows))  # an unused slot
        slots, at, ids = self._tensor(rows).T
        longest = _padded(max(len(s.ids) for s in sequences))

        def store(kept: Tensor, new: Tensor) -> Tensor:
            kept[slots, :, at] = new[:, :, 0]
            return kept[slots, :, :longest]

        hidden = self._compute(ids[:, None].tolist(), at[:, None], longest, store)[:, 0]
        return self._logits(hidden)[: len(sequences)]

    def _compute(
        self,
        ids: list[list[int]],
        positions: Tensor,
        longest: int,
        store: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Run a forward pass over ids [R, T]; return hidden states [R, T, D].

        `store` writes new keys or values [R, heads, T, D] into a part of the cache, and returns
        those at positions 0 to `longest` - 1, which the queries may see.
        """

        def store_both(layer: int, *new: Tensor) -> list[Tensor]:
            if layer not in self._cache:
                slots, room = self._size
                self._cache[layer] = [x.new_zeros(slots, x.shape[1], room, x.shape[3]) for x in new]
            return [store(kept, x) for kept, x in zip(self._cache[layer], new, strict=True)]

        distance = (positions[..., None] - torch.arange(longest, device=self._device))[:, None]
        arguments = {"position_ids": positions, "use_cache": False}
        arguments |= {"distance": distance, "store": store_both}
        return base_of(self._model)(input_ids=self._tensor(ids), **arguments).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] in float32 of hidden states [N, D]."""
        logits = logits_of(self._model, hidden).float()
        if self._num_ids is not None:
            logits[..., self._num_ids :] = -torch.inf
        return logits

    def _sample(self, sequences: list[_Sequence], logits: Tensor) -> Iterator[tuple[str, Result]]:
        """Sample a token from logits [N, V] for each sequence; yield the finished ones."""
        warmth = self._tensor([each.request.temperature or 1.0 for each in sequences])
        logprobs = (logits / warmth[:, None]).log_softmax(-1)
        sums = logprobs.exp().cumsum(-1, dtype=torch.float64)
        draws = torch.tensor([each.random.random() for each in sequences], dtype=torch.float64)
        reached = draws.to(self._device)[:, None] * sums[:, -1:]
        tokens = torch.searchsorted(sums, reached, right=True)[:, 0].clamp(max=sums.shape[1] - 1)
        greedy = [each.request.temperature == 0 for each in sequences]
        if any(greedy):
            tokens = torch.where(self._tensor(greedy), logits.argmax(-1), tokens)
        of_tokens = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for sequence, token, logprob in zip(sequences, tokens.tolist(), of_tokens, strict=True):
            sequence.is_begun = True
            done = sequence.take(token, logprob, self._version)
            if done is not None:
                self._free.append(sequence.slot)
                sequence.slot = -1
                yield sequence.request_id, done

    def _tensor(self, values: list[Any]) -> Tensor:
        kind = None if values else torch.int64
        return torch.tensor(values, dtype=kind, device=self._device)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    store: Callable[..., Sequence[Tensor]],
    distance: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a pass of `TransformersBackend`.

    `store` takes new keys and values, and returns those that queries may see. `distance` is the
    position of each query minus that of each key, as [..., queries, keys] for all heads. For other
    arguments see `hugging_face_attention.attention`.
    """
    refuse_unsupported(module, attention_mask, others)
    mask = distance >= 0
    if sliding_window:
        mask &= distance < sliding_window
    keys, values = store(cast(Any, module).layer_idx, key, value)
    size, heads = query.shape, keys.shape[1]
    if size[2] == 1 and softcap is None and s_aux is None:
        # One query per sequence: the query heads of each key head become several queries.
        query = query.reshape(size[0], heads, -1, size[3])
    keys, values = (for_all_heads(x, query.shape[1] // heads) for x in (keys, values))
    if softcap is None and s_aux is None:
        found = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling
        ).reshape(*size[:3], -1)
    else:
        found = explicit(query, keys, values, mask, scaling, softcap, s_aux)
    return found.transpose(1, 2), None


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _parts(sequences: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Sort sequences by length, and split them into parts, each for one forward pass."""
    part: list[_Sequence] = []
    for each in sorted(sequences, key=lambda each: len(each.ids)):
        if part and (len(part) + 1) * len(each.ids) > _PROMPT_TOKENS:
            yield part
            part = []
        part.append(each)
    if part:
        yield part

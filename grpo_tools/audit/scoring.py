"""Computes logprobs of sampled tokens with transformers, as the engine had its weights and its KV.

A response may continue over a swap of weights. Its tokens after it then depend on keys and values
(KV) that the former weights computed, unless `recompute_kv_after_pull` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_components.models.lora import ADAPTER_FILE, read_adapter_options
from grpo_components.trajectory import Trajectory

_MAX_TOKENS = 4096
"""Most tokens, with padding, in one forward pass."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a response that one version sampled in one request."""

    response: int
    """Number of the response, for whoever made the segments."""
    first: int
    """Position in the response of the segment's first token."""
    end: int
    version: int
    begins: bool
    """Whether all KV is computed by this version; else the segment before has left its own."""
    continues: bool
    """Whether the next segment needs this one's KV."""


def segments(trajectory: Trajectory, response: int, recompute_kv: bool) -> list[Segment]:
    """Split a response where a turn begins or the weights change.

    A turn is a request of its own: the engine computes its whole prompt by the weights that it has
    then. Raises a ValueError if, in one turn, a version follows a newer one.
    """
    found: list[Segment] = []
    numbered = zip(range(len(trajectory.response_ids)), trajectory.response_mask, strict=True)
    for sampled, turn in groupby(numbered, key=lambda pair: bool(pair[1])):
        if not sampled:
            continue
        positions = [position for position, _ in turn]
        parts = [list(p) for _, p in groupby(positions, key=trajectory.token_versions.__getitem__)]
        for number, part in enumerate(parts):
            version = int(trajectory.token_versions[part[0]])
            if number and version < found[-1].version:
                problem = f"version {version} after version {found[-1].version} in one turn"
                raise ValueError(f"token {part[0]} was sampled by {problem}")
            begins, is_last = recompute_kv or number == 0, number == len(parts) - 1
            continues = not (recompute_kv or is_last)
            found.append(Segment(response, part[0], part[-1] + 1, version, begins, continues))
    return found


class Scorer:
    """Scores segments; call it for one version after the other, in the order of the versions."""

    def __init__(self) -> None:
        disable_progress_bar()
        self._kv: dict[int, Any] = {}
        """KV of the responses that continue with a later version."""
        self._model: Any = None

    def load(self, model: Path, adapter: Path | None = None) -> None:
        """Load the weights of the next version, in float32; an adapter is merged into its model."""
        self._model = None  # first, so that there are never two
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if adapter is None:
            return
        scale, tensors = read_adapter_options(adapter).scale, load_file(adapter / ADAPTER_FILE)
        for name, a in tensors.items():
            path = name.removesuffix("lora_A.weight")
            if path != name:
                b = tensors[f"{path}lora_B.weight"]
                weight = self._model.get_parameter(
                    f"{path.removeprefix('base_model.model.')}weight"
                )
                weight.data += scale * (b.float() @ a.float())

    @torch.inference_mode()
    def logprobs(
        self, todo: Sequence[tuple[Segment, Trajectory]]
    ) -> Iterator[tuple[Segment, NDArray[np.float64]]]:
        """Yield the logprobs of each segment's tokens, at their sampling temperature."""
        together = list[tuple[Segment, Trajectory]]()
        for segment, trajectory in todo:
            if segment.begins and not segment.continues:
                together.append((segment, trajectory))
            else:
                yield segment, self._with_kv(segment, trajectory)
        together.sort(key=lambda pair: len(pair[1].prompt_ids) + pair[0].end)
        while together:
            # The longest one comes last, and decides how many there is room for.
            longest = len(together[-1][1].prompt_ids) + together[-1][0].end
            count = max(1, _MAX_TOKENS // longest)
            members, together = together[-count:], together[:-count]
            rows = [_ids(each)[: len(each.prompt_ids) + part.end - 1] for part, each in members]
            # What follows a token does not change it, so padding at the end needs no mask.
            inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            logits = self._model(input_ids=inputs, use_cache=False).logits
            for (segment, trajectory), row in zip(members, logits, strict=True):
                yield segment, _logprobs(row, segment, trajectory, 0)

    def _with_kv(self, segment: Segment, trajectory: Trajectory) -> NDArray[np.float64]:
        ids, prompt = _ids(trajectory), len(trajectory.prompt_ids)
        past = None if segment.begins else self._kv.pop(segment.response)
        start = 0 if segment.begins else prompt + segment.first - 1
        inputs = ids[None, start : prompt + segment.end - 1]
        output = self._model(input_ids=inputs, past_key_values=past, use_cache=True)
        if segment.continues:
            self._kv[segment.response] = output.past_key_values
        return _logprobs(output.logits[0], segment, trajectory, start)


def _ids(trajectory: Trajectory) -> Tensor:
    return torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]))


def _logprobs(
    logits: Tensor, segment: Segment, trajectory: Trajectory, start: int
) -> NDArray[np.float64]:
    """Return the logprobs of a segment's tokens; row 0 of the logits is of input `start`."""
    first = len(trajectory.prompt_ids) + segment.first - 1 - start
    rows = logits[first : first + segment.end - segment.first].float() / trajectory.temperature
    sampled = torch.from_numpy(trajectory.response_ids[segment.first : segment.end].copy())
    return rows.log_softmax(-1).gather(-1, sampled[:, None])[:, 0].double().numpy()

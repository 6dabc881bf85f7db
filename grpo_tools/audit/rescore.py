"""Recomputes the logprob of every trained token, with the model weights of its recorded version."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_components.files import Record
from grpo_components.models.lora import ADAPTER_FILE, ADAPTER_FOLDER, read_adapter_options
from grpo_components.settings import TRUNCATION
from grpo_components.state_files import read_state
from grpo_components.trajectory import Trajectory, batch_hash, response_numbers, unpack
from grpo_tools.audit.cross_checks import config_path, read_config, read_receipts

TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}
"""Largest difference of a logprob allowed between two engines, in nats, by the run's `dtype`."""
_FLOOR = 2e-6
"""Rounding error allowed for a logprob near 0, in nats."""
_MAX_PROBLEMS = 3
"""Maximum number of problems that are listed one by one."""
_MAX_TOKENS = 4096
"""Maximum tokens, with padding, in one forward pass."""


@dataclass(eq=False)
class Response:
    """A response of a batch, and which of its tokens were trained."""

    name: str
    trajectory: Trajectory
    trained: NDArray[np.bool_]
    """[R] True where the token was trained."""
    kv: Any = None
    """KV cache of its tokens so far, if the next segment continues with it."""

    @property
    def ids(self) -> Tensor:
        """Tokens of prompt and response."""
        both = [self.trajectory.prompt_ids, self.trajectory.response_ids]
        return torch.from_numpy(np.concatenate(both))


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a response that one policy version sampled in one request."""

    response: Response
    first: int
    """Position in the response of the segment's first token."""
    end: int
    version: int
    begins: bool
    """Whether this version computes the whole KV cache; else it extends the previous segment's."""
    continues: bool
    """Whether the next segment extends the KV cache of this one."""

    @property
    def inputs(self) -> int:
        """Number of tokens, from the prompt's first, that predict the segment's last token."""
        return len(self.response.trajectory.prompt_ids) + self.end - 1


def segments(response: Response, recompute_kv: bool) -> list[Segment]:
    """Split a response where a turn begins or the model weights change.

    A turn is a request of its own: the engine computes its whole prompt with the weights that it
    has at that time. Within a turn, tokens after a change depend on keys and values (KV) that the
    former weights computed, unless `recompute_kv_after_pull` is set. Raises a ValueError if a
    version follows a newer one in a turn.
    """
    found, versions = list[Segment](), response.trajectory.token_versions
    numbered = enumerate(response.trajectory.response_mask)
    for sampled, turn in groupby(numbered, key=lambda pair: bool(pair[1])):
        if not sampled:
            continue
        parts = groupby((position for position, _ in turn), key=versions.__getitem__)
        spans = [(int(version), [*positions]) for version, positions in parts]
        for number, (version, span) in enumerate(spans):
            if number and version < found[-1].version:
                problem = f"version {version} after version {found[-1].version} in one turn"
                raise ValueError(f"token {span[0]} was sampled by {problem}")
            begins, is_last = recompute_kv or number == 0, number == len(spans) - 1
            continues = not (recompute_kv or is_last)
            found.append(Segment(response, span[0], span[-1] + 1, version, begins, continues))
    return found


def load_model(model: Path, adapter: Path | None = None) -> Any:
    """Load a policy version's model in float32; a LoRA `adapter` is merged into `model`."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is None:
        return loaded
    scale, tensors = read_adapter_options(adapter).scale, load_file(adapter / ADAPTER_FILE)
    for name, a in tensors.items():
        path = name.removesuffix("lora_A.weight")
        if path != name:
            b = tensors[f"{path}lora_B.weight"]
            weight = loaded.get_parameter(f"{path.removeprefix('base_model.model.')}weight")
            weight.data += scale * (b.float() @ a.float())
    return loaded


@torch.inference_mode()
def score(model: Any, todo: Sequence[Segment]) -> Iterator[tuple[Segment, NDArray[np.float64]]]:
    """Yield the logprobs of each segment's tokens, at their sampling temperature.

    Call it once per version, in ascending order: `Response.kv` is kept for the next segment.
    """
    for segment in todo:
        if segment.begins and not segment.continues:
            continue
        response, start = segment.response, 0
        if not segment.begins:
            start = segment.inputs - (segment.end - segment.first)
        output = model(
            input_ids=response.ids[None, start : segment.inputs],
            past_key_values=None if segment.begins else response.kv,
            use_cache=True,
        )
        response.kv = output.past_key_values if segment.continues else None
        yield segment, _logprobs(output.logits[0], segment)
    together = [segment for segment in todo if segment.begins and not segment.continues]
    together.sort(key=lambda segment: segment.inputs)
    while together:
        # The longest segment comes last; padding to its length decides how many fit.
        count = max(1, _MAX_TOKENS // (together[-1].inputs + 1))
        members, together = together[-count:], together[:-count]
        rows = [segment.response.ids[: segment.inputs] for segment in members]
        # Attention is causal: padding at the end needs no mask.
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = model(input_ids=inputs, use_cache=False).logits
        for segment, row in zip(members, logits, strict=True):
            yield segment, _logprobs(row[: segment.inputs], segment)


def _logprobs(logits: Tensor, segment: Segment) -> NDArray[np.float64]:
    """Return logprobs of a segment's tokens; the last row of `logits` predicts the last token."""
    t = segment.response.trajectory
    rows = logits[segment.first - segment.end :].float() / t.temperature
    sampled = torch.from_numpy(t.response_ids[segment.first : segment.end].copy())
    return rows.log_softmax(-1).gather(-1, sampled[:, None])[:, 0].double().numpy()


@dataclass
class Rescored:
    """Differences between recorded and recomputed logprobs, and failed checks."""

    dtype: str
    steps: int
    versions: int = 0
    swapped: int = 0
    """Number of responses that continued over a swap of weights."""
    gaps: list[NDArray[np.float64]] = field(default_factory=list)
    """For each segment, the differences of its trained tokens' logprobs, in nats."""
    off: int = 0
    """Number of tokens that differ by more than is allowed."""
    worst: tuple[float, str] = (-1.0, "none")
    """Largest ratio of a token's difference to the allowed one, and a text about that token."""
    problems: list[str] = field(default_factory=list)

    def add(self, segment: Segment, values: NDArray[np.float64]) -> None:
        """Compare a segment's computed logprobs with those that the generator recorded."""
        part, response = slice(segment.first, segment.end), segment.response
        t = response.trajectory
        trained = np.flatnonzero(response.trained[part])
        if not len(trained):
            return
        recorded, computed = t.generator_logprobs[part][trained].astype(float), values[trained]
        gaps = np.nan_to_num(np.abs(computed - recorded), nan=np.inf)
        shares = np.nan_to_num(gaps / allowed(recorded, self.dtype), nan=np.inf)
        self.gaps.append(gaps)
        self.off += int((shares > 1).sum())
        at = int(shares.argmax())
        where = f"{response.name}, token {segment.first + trained[at]}, version {segment.version} "
        where += f"of attempt {t.attempt}: recorded {recorded[at]:.6f}, computed {computed[at]:.6f}"
        self.worst = max(self.worst, (float(shares[at]), where), key=lambda each: each[0])

    @property
    def broken(self) -> str:
        """The failed checks in one line; empty if there is none."""
        found = self.problems[:_MAX_PROBLEMS]
        if self.off:
            of = f"{self.off:,} of {sum(map(len, self.gaps)):,} tokens"
            found.append(f"{of} differ by more; the worst: {self.worst[1]}")
        return "; ".join(found)

    def table(self) -> str:
        """Summarize how far the logprobs differ, as lines to print."""
        gaps = np.concatenate(self.gaps or [np.array([math.nan])])
        return (
            f"rescored: {sum(map(len, self.gaps)):,} trained tokens of {self.steps} steps under "
            f"{self.versions} policy versions; {self.swapped:,} responses over a swap of weights\n"
            f"difference of the logprobs: {gaps.max():.2e} at most, {gaps.mean():.2e} on average; "
            f"allowed is {TOLERANCE[self.dtype]:.0e} ({self.dtype}), and less for likely tokens: "
            f"the worst has {self.worst[0]:.2g} of it\n"
            f"the worst: {self.worst[1]}\n"
        )


def allowed(logprobs: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the maximum difference between recorded and computed logprobs, in nats, per token.

    Rounded logits, or wrong weights, move the logprob of a token of probability p by a multiple of
    1 - p. A constant bound would miss wrong weights at likely tokens, so the bound for fp32 falls
    with 1 - p.
    """
    most = TOLERANCE[dtype]
    if dtype != "fp32":
        return np.full_like(logprobs, most)
    return np.minimum(most, most * -np.expm1(np.minimum(logprobs, 0.0)) + _FLOOR)


class CannotRescoreError(Exception):
    """The run lacks checkpoints, or samples in a way that rescoring does not repeat."""


def rescore(output_dir: Path) -> Rescored:
    """Recompute and compare the logprobs of all tokens that a run trained and did not roll back.

    Raises a CannotRescoreError if a step has no checkpoint, or the sampling cannot be repeated.
    """
    disable_progress_bar()
    records, steps, loads = read_receipts(output_dir / "receipts.jsonl")
    starts = {start["attempt"]: start for start in records}
    try:
        configs = {attempt: read_config(config_path(output_dir, attempt)) for attempt in starts}
    except OSError as error:
        raise CannotRescoreError(str(error)) from error
    checkpoints = {n: output_dir / "checkpoints" / f"step_{n}" for n in steps}
    for folder in checkpoints.values():
        if not (folder / "state" / "batch.json").is_file():
            needed = "save_every_n_steps: 1, and keep_last_n: null"
            raise CannotRescoreError(f"no checkpoint {folder}: the run needs {needed}")
    for config in configs.values():
        _check_sampling(config)
    last = configs[max(configs)]
    result = Rescored(str(last.get("dtype", "fp32")), len(steps))
    weights = {0: Path(str(last.get("base_model_path")))}
    for step, record in steps.items():
        weights.setdefault(record["policy_version"], checkpoints[step])
    responses = list[Response]()
    try:
        _compare_checksums(weights, loads, result)
        for step, record in steps.items():
            attempt = record["attempt"]
            oldest = record["trained_from"] - starts[attempt]["max_staleness"]
            cuts = bool(configs[attempt].get("mask_overlong"))
            responses += _responses(checkpoints[step], record, oldest, cuts, result)
        _score(weights, responses, configs, result)
    # What a damaged file can raise.
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    return result


def _score(
    weights: dict[int, Path],
    responses: list[Response],
    configs: dict[int, Record],
    result: Rescored,
) -> None:
    todo: dict[int, list[Segment]] = {}
    for response in responses:
        recompute = bool(configs[response.trajectory.attempt].get("recompute_kv_after_pull"))
        try:
            parts = segments(response, recompute)
        except ValueError as error:
            result.problems.append(f"{response.name}: {error}")
            continue
        versions = {part.version for part in parts}
        if missing := sorted(versions - weights.keys()):
            result.problems.append(f"{response.name}: version {missing[0]} has no checkpoint")
            continue
        result.swapped += len(versions) > 1 if recompute else not all(p.begins for p in parts)
        for part in parts:
            todo.setdefault(part.version, []).append(part)
    result.versions = len(todo)
    for version in sorted(todo):
        adapter = weights[version] / ADAPTER_FOLDER
        files = (weights[0], adapter) if adapter.is_dir() else (weights[version],)
        for segment, values in score(load_model(*files), todo[version]):
            result.add(segment, values)


def _responses(
    checkpoint: Path, record: Record, oldest: int, cuts: bool, result: Rescored
) -> Iterator[Response]:
    """Check a step's batch against its record; yield responses that can have trained tokens."""
    step, batch = record["step"], read_state(checkpoint / "state", "batch")
    if batch_hash(batch) != record["batch_hash"]:
        result.problems.append(f"step {step}: the batch in {checkpoint} is not the receipt's")
    counts, samples, last = Counter[int](), Counter[int](), -1
    for number, t in zip(response_numbers(batch).tolist(), unpack(batch), strict=True):
        samples[t.group_id] += number != last
        last = number
        if t.failed or (cuts and t.finish_reason == "length"):
            continue
        trained = t.response_mask & (t.token_versions >= oldest)
        counts.update(t.token_versions[trained].tolist())
        name = f"step {step}, group {t.group_id}, response {samples[t.group_id] - 1}"
        yield Response(name, t, trained)
    expected = {int(version): count for version, count in record["token_versions"].items()}
    if counts != expected:
        problem = f"the batch has {dict(counts)} tokens by version, the receipt {expected}"
        result.problems.append(f"step {step}: {problem}")


def _compare_checksums(weights: dict[int, Path], loads: list[Record], result: Rescored) -> None:
    """Check that each version's saved weights have the checksum that was published for it."""
    saved: dict[int, str] = {}
    for load in loads:
        version = load["version"]
        if version == 0 or version not in weights:
            continue  # no checkpoint has version 0
        if version not in saved:
            adapter = weights[version] / ADAPTER_FOLDER / ADAPTER_FILE
            files = [adapter] if adapter.parent.is_dir() else _weight_files(weights[version])
            saved[version] = _checksum(files)
        if saved[version] != load["published"]:
            found = f"has checksum {saved[version]}, published was {load['published']}"
            result.problems.append(f"version {version} in {weights[version]} {found}")


def _weight_files(checkpoint: Path) -> set[Path]:
    index = checkpoint / "model.safetensors.index.json"
    if not index.is_file():
        return {checkpoint / "model.safetensors"}
    return {checkpoint / name for name in json.loads(index.read_text())["weight_map"].values()}


def _checksum(files: Iterable[Path]) -> str:
    """Return the checksum of saved weights, computed without the code that publishes them."""
    found = list[tuple[str, str, list[int], int]]()
    for name, tensor in (pair for file in files for pair in load_file(file).items()):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digest = xxhash.xxh3_64_intdigest(f"{name} {dtype} {shape}".encode() + raw)
        found.append((name, dtype, shape, digest))
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(found)).encode())


def _check_sampling(config: Record) -> None:
    """Raise an error if the run set top_p, a penalty or the like, because `score` ignores them."""
    for name, neutral in TRUNCATION.items():
        given = (config.get("generator") or {}).get(name, neutral)
        if given != neutral and not (name == "top_k" and given == -1):
            raise CannotRescoreError(f"generator.{name}: {given:g} given; scored is {neutral:g}")

"""Computes the logprob of every trained token again, under the weights that its receipt names."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange import trained_batches
from grpo_components.exchange.policy_versions import VersionId
from grpo_components.exchange.trained_batches import read_batch
from grpo_components.settings import TRUNCATION
from grpo_components.trajectory import Trajectory, response_numbers, unpack
from grpo_components.versions.__main__ import open_run
from grpo_components.versions.kept_run import KeptRun
from grpo_components.versions.scoring import Scorer, Segment, segments
from grpo_tools.audit.settings import Settings, read_settings
from grpo_tools.json_lines import records_of

TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}
"""Largest difference allowed between two engines, in nats, by the run's `dtype`."""
_FLOOR = 2e-6
"""Rounding of a logprob that is near 0, in nats."""
_MAX_PROBLEMS = 3
"""Most problems that are told one by one."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Response:
    """A response of a batch, and which of its tokens were trained."""

    step: int
    sample: int
    """Number of the response in its group, from 0."""
    trajectory: Trajectory
    trained: NDArray[np.bool_]
    """[R]."""


@dataclass
class Rescored:
    """What was found."""

    tolerance: float
    dtype: str
    steps: int = 0
    tokens: int = 0
    versions: int = 0
    swapped: int = 0
    """Responses that continued over a swap of weights."""
    total: float = 0.0
    largest: float = -1.0
    where: str = "none"
    worst: float = 0.0
    """Largest difference as a share of what is allowed for its token."""
    worst_where: str = "none"
    off: int = 0
    """Tokens beyond the tolerance."""
    problems: list[str] = field(default_factory=list)

    def add(self, values: NDArray[np.float64], response: Response, segment: Segment) -> None:
        """Compare the tokens of a segment with what the generator recorded."""
        part = slice(segment.first, segment.end)
        recorded = response.trajectory.generator_logprobs[part].astype(np.float64)
        trained = response.trained[part]
        gaps = np.abs(values - recorded)
        gaps = np.where(np.isfinite(gaps), gaps, np.inf)[trained]
        if not len(gaps):
            return
        self.tokens += len(gaps)
        self.total += float(gaps.sum())
        shares = gaps / allowed(recorded[trained], self.dtype)
        shares = np.where(np.isfinite(shares), shares, np.inf)
        self.off += int((shares > 1).sum())

        def where(index: int) -> str:
            at, t = int(np.flatnonzero(trained)[index]), response.trajectory
            return (
                f"step {response.step}, group {t.group_id}, response {response.sample}, token "
                f"{segment.first + at}, version {segment.version} of attempt {t.attempt}: recorded "
                f"{recorded[at]:.6f}, computed {values[at]:.6f}"
            )

        if gaps.max() > self.largest:
            self.largest, self.where = float(gaps.max()), where(int(gaps.argmax()))
        if shares.max() > self.worst:
            self.worst, self.worst_where = float(shares.max()), where(int(shares.argmax()))

    @property
    def broken(self) -> str:
        """What does not hold; empty if all does."""
        found = self.problems[:_MAX_PROBLEMS]
        if more := len(self.problems) - len(found):
            found.append(f"and {more} more")
        if self.off:
            differ = f"{self.off:,} of {self.tokens:,} tokens differ by more"
            found.append(f"{differ}; the worst: {self.worst_where}")
        return "; ".join(found)

    def table(self) -> str:
        """Return the lines to print."""
        mean = self.total / self.tokens if self.tokens else math.nan
        lines = [
            f"rescored: {self.tokens:,} trained tokens of {self.steps} steps under "
            f"{self.versions} policy versions; {self.swapped:,} responses over a swap of weights",
            f"difference of the logprobs: {self.largest:.2e} at most, {mean:.2e} on average; "
            f"allowed is {self.tolerance:.0e} ({self.dtype}), and less for likely tokens: the "
            f"worst has {self.worst:.2g} of it",
            f"the largest: {self.where}",
        ]
        return "".join(f"{line}\n" for line in lines)


def allowed(logprobs: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the difference allowed for each token, in nats.

    The logprob of a token of probability p moves with 1 - p: by rounding of the logits, and by
    other weights. So a bound that is the same for all would see no other weights in a likely token.
    """
    most = TOLERANCE[dtype]
    if dtype != "fp32":
        return np.full_like(logprobs, most)
    return np.minimum(most, most * -np.expm1(np.minimum(logprobs, 0.0)) + _FLOOR)


class NothingKeptError(Exception):
    """The run has kept no policy versions."""


def rescore(output_dir: Path) -> Rescored:
    """Score all tokens that the steps of a run trained, but for steps that were rolled back."""
    starts, steps, pulls = _receipts(output_dir)
    begins = {attempt: start["policy_version"] for attempt, start in starts.items()}
    try:
        configs = {attempt: _config(output_dir, attempt) for attempt in starts}
        run = open_run(output_dir, begins)
    except (OSError, ValueError) as error:
        raise NothingKeptError(str(error)) from error
    if not configs:
        raise NothingKeptError(f"no receipts in {output_dir}")
    if not run:
        raise NothingKeptError(f"no versions in {run.folder} (keep_policy_versions: false)")
    for config in configs.values():
        _check_sampling(config)
    dtype = str(configs[max(configs)].get("dtype", "fp32"))
    result = Rescored(TOLERANCE[dtype], dtype)
    _compare_checksums(run, pulls, result)
    responses = [
        response
        for record in steps
        for response in _responses(output_dir, record, starts, configs, result)
    ]
    result.steps = len(steps)
    _score(run, responses, configs, result)
    return result


def _score(
    run: KeptRun, responses: list[Response], configs: Mapping[int, Settings], result: Rescored
) -> None:
    todo: dict[VersionId, list[tuple[Segment, Trajectory]]] = {}
    for number, response in enumerate(responses):
        trajectory = response.trajectory
        recompute = configs[trajectory.attempt].get("recompute_kv_after_pull") == "true"
        name = f"step {response.step}, group {trajectory.group_id}, response {response.sample}"
        try:
            parts = segments(trajectory, number, recompute)
            identities = [run.identity(trajectory.attempt, part.version) for part in parts]
        except ValueError as error:
            result.problems.append(f"{name}: {error}")
            continue
        result.swapped += any(not part.begins for part in parts) or (
            recompute and len({part.version for part in parts}) > 1
        )
        for identity, part in zip(identities, parts, strict=True):
            todo.setdefault(identity, []).append((part, trajectory))
    scorer, result.versions = Scorer(), len(todo)
    with tempfile.TemporaryDirectory() as scratch:
        for number, identity in enumerate(sorted(todo)):
            folder = Path(scratch) / f"{number}"
            try:
                run.write_merged(identity, folder)
            except ValueError as error:
                result.problems.append(str(error))
                return
            scorer.load(folder)
            for segment, values in scorer.logprobs(todo[identity]):
                result.add(values, responses[segment.response], segment)
            for file in folder.iterdir():
                file.unlink()


def _responses(
    output_dir: Path,
    record: Record,
    starts: Mapping[int, Record],
    configs: Mapping[int, Settings],
    result: Rescored,
) -> Iterator[Response]:
    """Yield the responses of a step's batch that can have trained tokens."""
    step, config = record["step"], configs[record["attempt"]]
    try:
        batch = read_batch(output_dir / trained_batches.FOLDER, record["batch_hash"])
    except ValueError as error:
        result.problems.append(f"step {step}: {error}")
        return
    oldest = record["trained_from"] - starts[record["attempt"]]["max_staleness"]
    cuts = config.get("mask_overlong") == "true"
    causes = record.get("tokens", {}).items()  # of a what-if's steps, some groups are left out
    left_out = {int(group) for group, counts in causes if "left_out" in counts}
    found, counts = list[Response](), Counter[int]()
    samples, numbers = Counter[int](), response_numbers(batch).tolist()
    last = -1
    for number, trajectory in zip(numbers, unpack(batch), strict=True):
        samples[trajectory.group_id] += number != last
        last = number
        cut_off = cuts and trajectory.finish_reason == "length"
        if trajectory.failed or cut_off or trajectory.group_id in left_out:
            continue
        trained = trajectory.response_mask & (trajectory.token_versions >= oldest)
        counts.update(trajectory.token_versions[trained].tolist())
        found.append(Response(step, samples[trajectory.group_id] - 1, trajectory, trained))
    expected = {int(version): count for version, count in record["token_versions"].items()}
    if counts != expected:
        problem = f"the batch has {dict(counts)} tokens by version, the receipt {expected}"
        result.problems.append(f"step {step}: {problem}")
    yield from found


def _compare_checksums(run: KeptRun, pulls: list[tuple[int, Record]], result: Rescored) -> None:
    """Check that what the receipts say was published is what was kept."""
    for attempt, pull in pulls:
        try:
            identity = run.identity(attempt, pull["version"])
            kept = run.kept.header(identity).checksum
        except ValueError as error:
            result.problems.append(str(error))
            continue
        if kept != pull["published"]:
            problem = f"{identity} is kept with checksum {kept}, published was {pull['published']}"
            result.problems.append(f"{run.folder}: {problem}")


def _receipts(
    output_dir: Path,
) -> tuple[dict[int, Record], list[Record], list[tuple[int, Record]]]:
    """Return the start record of each attempt, the steps that count, and all pulls."""
    starts, steps, pulls = dict[int, Record](), dict[int, Record](), list[tuple[int, Record]]()
    for record in records_of(output_dir / "receipts.jsonl"):
        attempt = record["attempt"]
        if record["record"] == "start":
            starts[attempt] = record
            steps = {n: each for n, each in steps.items() if n <= record["steps_done"]}
        elif record["record"] == "step":
            steps[record["step"]] = record
        pulls += [(attempt, pull) for pull in record.get("acknowledged", ())]
    return starts, list(steps.values()), pulls


def _config(output_dir: Path, attempt: int) -> Settings:
    """Return the config of an attempt; a file has the number of the last attempt that had it."""
    files = {
        int(number): path
        for path in output_dir.glob("config_attempt_*.yaml")
        if (number := path.stem.removeprefix("config_attempt_")).isdigit()
    }
    last = min((number for number in files if number >= attempt), default=None)
    path = output_dir / "config.yaml" if last is None else files[last]
    try:
        return read_settings(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_sampling(config: Settings) -> None:
    """Refuse a run whose logprobs are of a distribution that is not computed here."""
    generator = config.get("generator")
    for name, neutral in TRUNCATION.items():
        given = float(generator.get(name, neutral)) if isinstance(generator, dict) else neutral
        if given != neutral and not (name == "top_k" and given == -1):
            raise NothingKeptError(f"generator.{name}: {given:g} given; only {neutral:g} is scored")

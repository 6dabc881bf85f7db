"""Measure how many bytes a delta push takes on real training steps, and the time that it costs.

    python benchmarks/delta_push.py              # --steps, --repeats, --size, --output

A delta push sends generators only what changed since the push before. Two runs of the demo, at its
learning rate and at 1e-6, save a checkpoint after each step. A checkpoint has the weights that the
step pushes; rounded to bf16, it has what `dtype: bf16` would push of the same float32 weights. The
product's own code encodes each step's weights against those of the step before, rebuilds them, and
compares the checksums. Times are CPU seconds of one thread for random weights of `--size` million
elements with a deviation of 0.02, each moved by a step of Adam's size.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import TRAIN_DEMO, briefly_evaluated, finish, machine_line, markdown_table
from safetensors.torch import load_file
from torch import Tensor

from grpo_components.cluster.handles import MAX_DELTAS
from grpo_components.exchange.weight_deltas import (
    NO_BASE,
    Bucket,
    DeltaBucket,
    DeltaEncoder,
    RebuiltWeights,
    encode_bucket,
)
from grpo_components.exchange.weights import BucketBuffers, pack_bucket, unpack_buckets

RATES = ("1e-4", "1e-6")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SETTLED = 5
"""Steps after which Adam's moments have forgotten that they began at 0."""


@dataclass(frozen=True)
class Step:
    """What changed in one training step."""

    elements: float
    """Share of the weights' elements whose bytes changed."""
    nbytes: float
    """Bytes of the delta, as a share of the whole push."""


def train(rate: str, num_steps: int, folder: Path) -> None:
    """Run the demo with a checkpoint after each step."""
    more = ("save_every_n_steps=1", "keep_last_n=null", f"optimizer.lr={rate}", "push=delta")
    finish([*TRAIN_DEMO, *briefly_evaluated(num_steps), f"output_dir={folder}", *more])


def weights_of(folder: Path, step: int, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Return the weights after a step, as a push of that dtype has them."""
    tensors = load_file(folder / "checkpoints" / f"step_{step}" / "model.safetensors")
    return [(name, tensor.to(dtype)) for name, tensor in sorted(tensors.items())]


def changes(steps: Sequence[list[tuple[str, Tensor]]]) -> list[Step]:
    """Return what changed in each step; check that the rebuilt weights have the right bits."""
    encoder, rebuilt, found = DeltaEncoder(), RebuiltWeights(), []
    version = NO_BASE
    for number, tensors in enumerate(steps):
        bucket = pack_bucket(tensors)
        delta = encoder.encode(number, bucket, version)
        version = number
        buckets = rebuilt.rebuild(number, [delta])
        unpack_buckets(buckets)  # verifies the checksums
        rebuilt.keep(buckets)
        if number:
            share = len(delta.packed) / len(bucket[1])
            found.append(Step(changed_elements(steps[number - 1], tensors), share))
    return found


def changed_elements(before: list[tuple[str, Tensor]], after: list[tuple[str, Tensor]]) -> float:
    """Return the share of the elements whose bytes differ."""
    whole = {2: torch.int16, 4: torch.int32}
    changed = total = 0
    for (_, old), (_, new) in zip(before, after, strict=True):
        as_bits = whole[new.itemsize]
        changed += int((old.view(as_bits) != new.view(as_bits)).sum())
        total += new.numel()
    return changed / total


def with_whole_pushes(delta: float) -> float:
    """Return the mean size of delta and whole pushes in a long run, as a share of a whole push."""
    deltas = max(1, min(MAX_DELTAS, int(1 / delta)))
    return (1 + deltas * delta) / (1 + deltas)


def bytes_table(found: dict[tuple[str, str], list[Step]]) -> str:
    """Return a table of changed elements and bytes: step 2; median and range of settled steps."""

    def cells(shares: list[float]) -> list[str]:
        settled = shares[SETTLED:]
        spread = f"{100 * min(settled):.3g} to {100 * max(settled):.3g}"
        return [f"{100 * shares[0]:.3g}", f"{100 * statistics.median(settled):.3g} ({spread})"]

    rows = []
    for (rate, dtype), steps in found.items():
        nbytes = [step.nbytes for step in steps]
        mean = with_whole_pushes(statistics.median(nbytes[SETTLED:]))
        elements = cells([step.elements for step in steps])
        rows.append([f"{dtype}, {rate}", *elements, *cells(nbytes), f"{100 * mean:.3g}"])
    elements, nbytes = "elements changed, %", "bytes of the delta, % of a whole push"
    header = ["dtype, learning rate", f"{elements}: step 2", "later steps"]
    header += [f"{nbytes}: step 2", "later steps", "mean of all pushes, % of a whole one"]
    return markdown_table(header, rows)


def moved(size: int, rate: float, dtype: torch.dtype) -> tuple[Bucket, Bucket]:
    """Return random weights before and after a step of Adam's size, packed as a push packs them."""
    torch.manual_seed(0)
    names = [f"layer.{number}" for number in range(size // 10**6)]
    before = {name: 0.02 * torch.randn(1000, 1000) for name in names}
    after = {name: tensor + rate * torch.randn(1000, 1000) for name, tensor in before.items()}
    buckets = [
        pack_bucket([(name, tensor.to(dtype)) for name, tensor in weights.items()])
        for weights in (before, after)
    ]
    return buckets[0], buckets[1]


def cpu_seconds(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run the cases in alternation; return the median CPU seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            gc.collect()
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def times_row(size: int, rate: str, dtype: str, repeats: int) -> list[str]:
    """Return a row of the table of times: what a whole push takes, and what a delta push adds."""
    base, new = moved(size, float(rate), DTYPES[dtype])
    tensors = list(unpack_buckets([new]).items())
    buffers = BucketBuffers(len(new[1]), pinned=False)
    whole, delta = DeltaBucket(1, *base), DeltaBucket(2, *encode_bucket(new, base))
    held = RebuiltWeights()

    def export() -> None:
        bucket = buffers.bucket()
        for name, tensor in tensors:
            bucket.add(name, tensor)
        bucket.close()

    def rebuild() -> None:
        held.rebuild(2, [delta])

    def before_rebuild() -> None:
        held.keep(held.rebuild(1, [whole]))

    found = cpu_seconds(
        {
            "export": export,
            "encode": lambda: encode_bucket(new, base),
            "whole": before_rebuild,
            "rebuild": rebuild,
            "check": lambda: unpack_buckets([new]),
        },
        repeats,
    )
    millions = len(new[0])
    shares = [f"{1000 * found[name]:.0f}" for name in ("export", "encode", "rebuild", "check")]
    nbytes = f"{100 * len(delta.packed) / len(new[1]):.3g}"
    ratio = f"{found['encode'] / found['export']:.1f}"
    return [f"{dtype}, {rate}, {millions}M", nbytes, *shares, ratio]


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--size", type=int, default=100, help="million elements to time")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats")
    parser.add_argument("--output", type=Path, help="folder to keep the runs in")
    arguments = parser.parse_args()
    for name, least in (("steps", SETTLED + 2), ("size", 1), ("repeats", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name}: {getattr(arguments, name)} given; allowed: at least {least}")
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[Step]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rate in RATES:
            folder = (arguments.output or Path(scratch)) / f"lr_{rate}"
            train(rate, arguments.steps, folder)
            for name, dtype in DTYPES.items():
                steps = range(1, arguments.steps + 1)
                found[rate, name] = changes([weights_of(folder, step, dtype) for step in steps])
    rows = [
        times_row(arguments.size * 10**6, rate, dtype, arguments.repeats)
        for dtype in DTYPES
        for rate in RATES
    ]
    header = ["", "delta, % of the whole", "whole push: copy and checksums, ms CPU"]
    header += ["encode, ms", "rebuild, ms", "checksums of the rebuilt, ms", "encode / whole push"]
    sys.stdout.write(
        f"{machine_line()}\n\n{bytes_table(found)}\n\n{markdown_table(header, rows)}\n"
    )


if __name__ == "__main__":
    main()

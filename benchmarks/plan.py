"""Compare the plan of a run's memory with measured peaks on a CPU, and with published sizes.

    python benchmarks/plan.py [--published]

Each case trains with the real `Trainer`, or asks the real `Reference` for logprobs, and counts the
bytes of live tensors: those of all storages that PyTorch's operations made. With one rank, the
table also shows the peak of PyTorch's own allocator (by torch.profiler, which does not see what
gloo's threads free if there are two ranks). The pages of the process, which also hold libraries and
freed buffers, are not counted. A case has batches of three kinds of lengths, like the plan: after
one step to warm up, it runs one step for each, and the largest peak counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import in_child, machine_line, markdown_table
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity, profile, record_function
from torchtune import config
from torchtune.models import qwen2_5
from train_step import build_trainer, checkpointer, random_trajectory, write_base_model

from grpo_components._plugin import config_files, recipes_folder
from grpo_components.config.reading import read_settings
from grpo_components.quiet import without_prints
from grpo_components.rendezvous import Rendezvous, local_rendezvous
from grpo_components.settings import Settings
from grpo_components.training.reference import Reference
from grpo_components.trajectory import PackedTrajectories, Trajectory, pack
from grpo_tools.memory_plan.live_bytes import counting
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import Device
from grpo_tools.memory_plan.trainer_memory import reference_memory, trainer_memory

PROMPT_TOKENS = 64
_CPU = Device(is_gpu=False, gib=64.0)
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One measurement: a trainer with this model, batch and number of ranks, or a reference."""

    name: str
    width: int = 256
    layers: int = 4
    vocabulary: int = 4096
    ranks: int = 1
    checkpointing: bool = False
    tokens: int = 1024
    """Token budget of a micro-batch."""
    groups: int = 4
    response: int = 128
    """Tokens of the longest response."""
    reference: bool = False

    @property
    def cfg(self) -> Settings:
        """The demo's config with the sizes of the case."""
        path = config_files(recipes_folder() / "configs")["tiny_async_grpo"]
        sizes = {
            "model": {
                "vocab_size": self.vocabulary,
                "num_layers": self.layers,
                "num_heads": self.width // 32,
                "embed_dim": self.width,
                "intermediate_dim": 4 * self.width,
            },
            "num_trainers": self.ranks,
            "groups_per_step": self.groups,
            "group_size": 8,
            "tokens_per_micro_batch": self.tokens,
            "enable_activation_checkpointing": self.checkpointing,
            "dataset": {"max_prompt_tokens": PROMPT_TOKENS},
            "generator": {"max_response_tokens": self.response},
        }
        return read_settings(OmegaConf.merge(OmegaConf.load(path), sizes))  # pyright: ignore

    @property
    def dtype(self) -> str:
        """dtype of the base model on disk."""
        return "fp32"

    @property
    def build_model(self) -> Any:
        """Function that builds the torchtune model."""
        return partial(config.instantiate, self.cfg.model)


CASES = (
    Case("narrow", width=128, layers=2),
    Case("wide", width=384, layers=3),
    Case("deep, checkpointing", layers=8, checkpointing=True),
    Case("large vocabulary", layers=2, vocabulary=32768),
    Case("one micro-batch for all", tokens=16384),
    Case("small micro-batches", tokens=256, groups=8),
    Case("two ranks", ranks=2),
    Case("two ranks, checkpointing", ranks=2, layers=6, checkpointing=True, tokens=2048),
    Case("reference", reference=True),
)


@dataclass(frozen=True)
class Peaks:
    """Peak memory in bytes, of the trainer rank that needs most, or of the reference."""

    live: int
    """Peak bytes of live tensors."""
    allocated: int | None
    """Peak bytes that PyTorch's allocator held; None with several ranks."""


def predicted(case: Case) -> int:
    """Return the peak bytes that the plan predicts for a trainer rank, or for the reference."""
    if case.reference:
        return reference_memory(case.cfg, PROMPT_TOKENS, _CPU).total
    sizes = ModelSizes.of(case.build_model)
    return trainer_memory(case.cfg, sizes, PROMPT_TOKENS, _CPU).total


def measured(case: Case) -> Peaks:
    """Return the peaks of a case, each rank in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base_model(case, folder)  # pyright: ignore[reportArgumentType] -- what it reads
        if case.ranks == 1:
            return in_child(peaks_of_rank, case, folder, 0)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(case.ranks, mp_context=context) as pool:
            ranks = range(case.ranks)
            meeting = local_rendezvous()
            jobs = [(case, folder, rank, meeting) for rank in ranks]
            found = list(pool.map(peaks_of_rank, *zip(*jobs, strict=True)))
        return Peaks(max(peaks.live for peaks in found), None)


def peaks_of_rank(case: Case, folder: Path, rank: int, meeting: Rendezvous | None = None) -> Peaks:
    """Train, or ask the reference for logprobs, and return the memory peaks of this process."""
    torch.set_num_threads(1)
    with (
        without_prints("ERROR"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        counting() as live,
    ):
        run, close = (
            _reference(case, folder) if case.reference else _trainer(case, folder, rank, meeting)
        )
        every = batches(case)
        run(every[0])  # makes the optimizer's state and the push's buffer
        live.mark()
        with record_function("measured"):
            for batch in every:
                run(batch)
            peak = live.mark()
        close()
    return Peaks(peak, _allocated(profiler) if case.ranks == 1 else None)


def batches(case: Case) -> list[PackedTrajectories]:
    """Return three batches: responses all as long as allowed, spread below that, and short."""
    longest, size = case.response, case.cfg.group_size
    lengths = [
        np.full(size, longest),
        np.linspace(max(longest // 8, 1), longest, size).astype(int),
        np.full(size, PROMPT_TOKENS // 2),
    ]
    return [_batch(case, each.tolist()) for each in lengths]


def _batch(case: Case, lengths: Sequence[int]) -> PackedTrajectories:
    rng = np.random.default_rng(0)
    trajectories: list[Trajectory] = []
    for group in range(1 if case.reference else case.groups):
        prompt = rng.integers(0, case.vocabulary, PROMPT_TOKENS)
        for length in lengths:
            trajectory = random_trajectory(rng, case.vocabulary, prompt, length, group)
            if case.reference:
                trajectory.reference_logprobs = None
            trajectories.append(trajectory)
    return pack(trajectories)


def _reference(case: Case, folder: Path) -> tuple[Any, Any]:
    cfg = case.cfg
    reference = Reference(
        build_model=case.build_model,
        build_checkpointer=checkpointer(folder / "base"),
        device="cpu",
        dtype=cfg.dtype,
        kl_estimator="k3",
        tokens_per_micro_batch=cfg.tokens_per_micro_batch,
        logprob_chunk_tokens=cfg.logprob_chunk_tokens,
    )
    return reference.add_logprobs, lambda: None


def _trainer(case: Case, folder: Path, rank: int, meeting: Rendezvous | None) -> tuple[Any, Any]:
    cfg = case.cfg
    trainer = build_trainer(
        folder / "base",
        "cpu",
        rank,
        meeting,
        case.ranks,
        build_model=case.build_model,
        dtype=cfg.dtype,
        enable_activation_checkpointing=cfg.enable_activation_checkpointing,
        logprob_chunk_tokens=cfg.logprob_chunk_tokens,
        tokens_per_micro_batch=cfg.tokens_per_micro_batch,
        build_optimizer=partial(config.instantiate, cfg.optimizer),
        clip_grad_norm=1.0,
    )
    samples = case.groups * cfg.group_size
    advantages = np.linspace(-1, 1, samples).astype(np.float32)

    def step(batch: PackedTrajectories) -> None:
        trainer.train_step(batch, advantages, 0)
        trainer.gather_weights()
        trainer.export_weights(trainer.policy_version)

    return step, trainer.close


def _allocated(profiler: Any) -> int:
    """Return the most bytes that the allocator held at once while the part `measured` ran."""
    events = profiler.profiler.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == "measured")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = most = 0
    for when, nbytes in changes:
        live += nbytes
        if when >= began:
            most = max(most, live)
    return most


# ---- published sizes ----------------------------------------------------------------------------

PUBLISHED = {
    "qwen2_5_3b": (3.09e9, 2.77e9),
    "qwen2_5_7b_base": (7.61e9, 6.53e9),
    "qwen2_5_14b_base": (14.7e9, 13.1e9),
    "qwen2_5_32b_base": (32.5e9, 31.0e9),
}
"""Parameters that the model cards state: all of them, and those that are not embeddings."""


def sizes_of(name: str) -> tuple[int, int]:
    """Return the parameters of a Qwen2.5 model: all of them, and those that are not embeddings."""
    sizes = ModelSizes.of(getattr(qwen2_5, name))
    embeddings = sizes.vocabulary * sizes.dim
    is_tied = len(sizes.units) == sizes.num_layers + 2
    return sizes.parameters, sizes.parameters - embeddings * (1 if is_tied else 2)


def _published_table() -> str:
    rows = []
    for name, (all_published, others_published) in PUBLISHED.items():
        every, others = sizes_of(name)
        published = [f"{all_published / 1e9:.4g} B", f"{others_published / 1e9:.3g} B"]
        ours = [f"{every / 1e9:.4g} B", f"{others / 1e9:.3g} B", f"{2 * every / 2**30:.1f} GiB"]
        rows.append([name, *published, *ours])
    header = ["model", "card: all", "card: others", "plan: all", "plan: others", "in bf16"]
    return markdown_table(header, rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", action="store_true", help="only the published sizes")
    options = parser.parse_args()
    rows = []
    for case in () if options.published else CASES:
        peaks, planned = measured(case), predicted(case)
        allocated = "-" if peaks.allocated is None else f"{peaks.allocated / _MIB:.1f}"
        ratio = f"{planned / peaks.live:.3f}"
        cells = [f"{planned / _MIB:.1f}", f"{peaks.live / _MIB:.1f}", allocated, ratio]
        rows.append([case.name, *cells])
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    if rows:
        header = ["MiB", "planned", "live tensors", "allocator", "planned / live"]
        sys.stdout.write(f"{machine_line()}\n\n{markdown_table(header, rows)}\n\n")
    sys.stdout.write(f"{_published_table()}\n")


if __name__ == "__main__":
    main()

"""Measure one training step on ragged batches: our trainer against padding to the longest.

    python benchmarks/train_step.py [--quick]

One step is forward, loss, backward and optimizer on one rank. The baseline is `padded_baseline.py`.
`--shapes` takes groups of other lengths: `--shapes --sequences 64 --tokens-per-micro-batch 4096`.
With `--model qwen2_5_0_5b` (or another) or `--alone`, only our trainer is measured:

    python benchmarks/train_step.py --device cuda --dtype bf16 --model qwen2_5_3b \
        --compile --sequences 64 --longest-response 1024 --tokens-per-micro-batch 16384
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import (
    in_child,
    in_lean_child,
    interleaved,
    machine_line,
    markdown_table,
    peak_memory_gib,
    spread,
)
from numpy.typing import NDArray
from padded_baseline import PaddedBaseline
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from torchtune.models.qwen2_5 import qwen2_5_0_5b, qwen2_5_1_5b_base, qwen2_5_3b
from torchtune.training import FullModelHFCheckpointer

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.loading import DTYPES
from grpo_components.models.logprobs import parts_of, token_batch
from grpo_components.models.meshes import Meshes, Sharding, join_ranks
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.objective.aggregation import TokenMean
from grpo_components.objective.composition import Penalties
from grpo_components.objective.losses import GRPOLoss
from grpo_components.objective.objective import TrainedObjective
from grpo_components.objective.off_policy import NoCorrection
from grpo_components.quiet import without_prints
from grpo_components.rendezvous import Rendezvous, local_rendezvous
from grpo_components.training.sharded_policy import load_policy
from grpo_components.training.trainer import Trainer
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.trajectory import Trajectory, pack

VOCABULARIES = (4096, 32768, 151936)
SHAPES = ("40/11", "200/100", "300/40", "40/300")
GROUP_SIZE = 8
PROMPT_LENGTHS = (32, 64)
SHORTEST_RESPONSE = 8
CLIP, KL_COEFF, LEARNING_RATE = 0.2, 0.001, 1e-6
NEVER_STALE = StalenessContract(10**6, 1)
"""Staleness bound that no token exceeds: repeats train the same tokens at ever newer versions."""
TIMEOUT_S = 600.0
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2_5_0_5b": qwen2_5_0_5b,
    "qwen2_5_1_5b": qwen2_5_1_5b_base,
    "qwen2_5_3b": qwen2_5_3b,
}
Batch = tuple[list[Trajectory], NDArray[np.float32]]


@dataclass(frozen=True)
class Setting:
    """Model, device, batch and trainer options of one measurement."""

    model: str = "tiny"
    vocabulary: int = VOCABULARIES[0]
    """Size of the tiny model's vocabulary."""
    device: str = "cpu"
    dtype: str = "fp32"
    sequences: int = 16
    longest_response: int = 256
    shape: tuple[int, int] | None = None
    """Mean tokens of a prompt and of a response; lengths are uniform within 20 % and 50 % of these.
    None: short prompts, and responses with a long tail of lengths."""
    tokens_per_micro_batch: int = 1024
    logprob_chunk_tokens: int = 1024
    compile: bool = False
    activation_checkpointing: bool = False

    @property
    def build_model(self) -> Callable[[], Any]:
        """Function that builds the torchtune model."""
        if self.model in MODELS:
            return MODELS[self.model]
        return partial(
            qwen2,
            vocab_size=self.vocabulary,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=128,
            intermediate_dim=512,
            max_seq_len=4096,
            tie_word_embeddings=True,
        )


# ---- model and batch ----------------------------------------------------------------------------


def write_base_model(setting: Setting, folder: Path) -> None:
    """Write a random model as a Hugging Face checkpoint to `folder / "base"`, for both trainers."""
    base = folder / "base"
    base.mkdir()
    with torch.device("meta"):
        model = setting.build_model()
    generator = torch.Generator().manual_seed(0)
    state_dict = {
        name: torch.ones(value.shape)
        if name.endswith("scale")  # of a norm
        else torch.empty(value.shape).normal_(std=0.02, generator=generator)
        for name, value in model.state_dict().items()
    }
    attention = model.layers[0].attn
    sizes = {
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "dim": model.tok_embeddings.embedding_dim,
    }
    renamed = qwen2_tune_to_hf(state_dict, tie_word_embeddings=True, **sizes)
    tensors = {name: value.to(DTYPES[setting.dtype]) for name, value in renamed.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen2",
        "hidden_size": sizes["dim"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "tie_word_embeddings": True,
    }
    (base / "config.json").write_text(json.dumps(config))


def ragged_batch(setting: Setting) -> Batch:
    """Return groups of random tokens, and advantages.

    Long-tailed lengths of responses are log-normal with sigma 1 and a median of a quarter of the
    longest one allowed, so one in twelve is truncated.
    """
    rng = np.random.default_rng(0)
    size, longest = setting.sequences, setting.longest_response
    vocabulary = _vocabulary(setting)
    if setting.shape is None:
        low, high = PROMPT_LENGTHS
        lengths = rng.lognormal(math.log(longest / 4), 1.0, size).round()
        lengths = lengths.clip(SHORTEST_RESPONSE, longest).astype(int)
    else:
        prompt, response = setting.shape
        low, high = round(prompt * 0.8), round(prompt * 1.2)
        longest = round(response * 1.5)
        lengths = rng.integers(round(response * 0.5), longest, size, endpoint=True)
    trajectories: list[Trajectory] = []
    prompt = np.zeros(0, np.int64)
    for number, length in enumerate(lengths.tolist()):
        if number % GROUP_SIZE == 0:
            prompt = rng.integers(0, vocabulary, rng.integers(low, high, endpoint=True))
        trajectory = random_trajectory(rng, vocabulary, prompt, length, number // GROUP_SIZE)
        if length >= longest:
            trajectory.finish_reason = "length"
        trajectories.append(trajectory)
    return trajectories, rng.normal(size=size).astype(np.float32)


def random_trajectory(
    rng: np.random.Generator, vocabulary: int, prompt: NDArray[np.int64], length: int, group: int
) -> Trajectory:
    """Return a response of random tokens.

    A random model gives every token about the same probability. Generator and reference logprobs
    are this probability with noise, so that some ratios are clipped.
    """
    generator, reference = rng.normal(-math.log(vocabulary), 0.15, (2, length)).astype(np.float32)
    return Trajectory(
        prompt_ids=prompt,
        response_ids=rng.integers(0, vocabulary, length),
        response_mask=np.ones(length, bool),
        generator_logprobs=generator,
        token_versions=np.zeros(length, np.int32),
        prompt_index=group,
        epoch=0,
        group_id=group,
        attempt=0,
        finish_reason="stop",
        reference_logprobs=reference,
    )


def _vocabulary(setting: Setting) -> int:
    with torch.device("meta"):
        return setting.build_model().tok_embeddings.num_embeddings


def all_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Tokens of each sequence, including the prompt."""
    return [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]


def our_plan(setting: Setting, trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return our trainer's micro-batches, as lists of trajectories' indices."""
    budget = setting.tokens_per_micro_batch
    return plan_micro_batches(parts_of(trajectories), lambda tokens, _: tokens, 1, budget)[0]


# ---- the two trainers ---------------------------------------------------------------------------


def checkpointer(base: Path) -> Callable[[], Any]:
    """Return a function that builds the checkpointer of a base model."""
    return partial(
        FullModelHFCheckpointer,
        checkpoint_dir=str(base),
        checkpoint_files=["model.safetensors"],
        model_type="QWEN2",
        output_dir=str(base.parent / "output"),
    )


_build_optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)  # as in every config


def trainer_options(base: Path, num_ranks: int = 1, **options: Any) -> TrainerOptions:
    """Return the options of a trainer that refuses no token as stale, for a Qwen2 policy."""
    return TrainerOptions(
        num_ranks=num_ranks,
        sharding=Sharding(),
        collective_timeout_s=TIMEOUT_S,
        build_checkpointer=checkpointer(base),
        base_model_path=str(base),
        model_type="QWEN2",
        contract=NEVER_STALE,
        **options,
    )


def build_trainer(
    base: Path,
    device: str,
    rank: int = 0,
    rendezvous: Rendezvous | None = None,
    num_ranks: int = 1,
    **options: Any,
) -> Trainer:
    """Build a rank of this project's trainer, by default the only one."""
    return Trainer(
        rank=rank,
        device=device,
        seed=0,
        rendezvous=rendezvous or local_rendezvous(),
        options=trainer_options(base, num_ranks, **options),
        objective=TrainedObjective(
            loss=GRPOLoss(clip_low=CLIP, clip_high=CLIP),
            penalties=Penalties(kl_coeff=KL_COEFF),
            aggregation=TokenMean(),
            off_policy=NoCorrection(),
        ),
    )


def _options_of(setting: Setting) -> dict[str, Any]:
    return {
        "build_model": setting.build_model,
        "dtype": setting.dtype,
        "enable_activation_checkpointing": setting.activation_checkpointing,
        "compile": setting.compile,
        "logprob_chunk_tokens": setting.logprob_chunk_tokens,
        "tokens_per_micro_batch": setting.tokens_per_micro_batch,
        "log_peak_memory_stats": True,
        "build_optimizer": _build_optimizer,
    }


def build_baseline(setting: Setting, folder: Path, num_micro_batches: int) -> PaddedBaseline:
    """Build the baseline with the model, precision and FSDP that our trainer has."""
    if torch.distributed.is_initialized():  # by our trainer in this process
        mesh = init_device_mesh(setting.device, (1,))
        meshes = Meshes(mesh, mesh, mesh)
    else:
        meshes = join_ranks(0, 1, local_rendezvous(), setting.device, Sharding(), TIMEOUT_S)
    model = load_policy(trainer_options(folder / "base", **_options_of(setting)), meshes)
    return PaddedBaseline(
        model,
        _build_optimizer(model.parameters()),
        clip=CLIP,
        kl_coeff=KL_COEFF,
        num_micro_batches=num_micro_batches,
        device=setting.device,
    )


Step = Callable[[Batch], dict[str, Any]]


def _our_step(setting: Setting, folder: Path) -> Step:
    trainer = build_trainer(folder / "base", setting.device, **_options_of(setting))
    return lambda batch: trainer.train_step(pack(batch[0]), batch[1], 0).metrics


def _baseline_step(setting: Setting, folder: Path) -> Step:
    num_micro_batches = len(our_plan(setting, ragged_batch(setting)[0]))
    baseline = build_baseline(setting, folder, num_micro_batches)
    return lambda batch: baseline.train_step(*batch)


TRAINERS = {"ours": _our_step, "baseline": _baseline_step}


# ---- measurements in fresh processes ------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Seconds and first results of both trainers on one batch."""

    seconds: dict[str, list[float]]
    """Seconds of each repeat, by trainer (`ours`, `baseline`)."""
    first: dict[str, dict[str, float]]
    """Loss and gradient norm of the first step, from the same weights."""

    @property
    def disagreement(self) -> float:
        """The larger relative difference of loss and gradient norm."""
        ours, baseline = self.first["ours"], self.first["baseline"]
        return max(abs(ours[key] / baseline[key] - 1) for key in baseline)


def compare(setting: Setting, folder: Path, repeats: int) -> Comparison:
    """Time the steps of both trainers in alternation; call it in a fresh process."""
    batch = ragged_batch(setting)
    with without_prints("WARNING"):
        steps = {name: build(setting, folder) for name, build in TRAINERS.items()}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}

    def run(name: str) -> None:
        seen[name].append(steps[name](batch))

    cases = {name: partial(run, name) for name in steps}
    seconds = interleaved(cases, repeats, setting.device)
    torch.distributed.destroy_process_group()
    keys = ("loss/total", "grad_norm")
    first = {name: {key: metrics[0][key] for key in keys} for name, metrics in seen.items()}
    return Comparison(seconds, first)


def peak_of(setting: Setting, folder: Path, trainer: str) -> float:
    """Peak memory in GiB of a step, above weights, optimizer state and gradients.

    Call it in a fresh process.
    """
    trajectories, advantages = ragged_batch(setting)
    with without_prints("WARNING"):
        step = TRAINERS[trainer](setting, folder)
    shortest = np.argsort(all_lengths(trajectories))[:1]
    step(([trajectories[i] for i in shortest], advantages[shortest]))
    peak = peak_memory_gib(lambda: step((trajectories, advantages)), setting.device)
    torch.distributed.destroy_process_group()
    return peak


def run_alone(setting: Setting, folder: Path, repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Time our trainer; returns its seconds, and the last step's metrics with the median MFU.

    Call it in a fresh process.
    """
    batch = ragged_batch(setting)
    with without_prints("WARNING"):
        step = _our_step(setting, folder)
    seen: list[dict[str, Any]] = [step(batch)]  # compiles
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # excludes the peak of loading the model
    timed = interleaved({"ours": lambda: seen.append(step(batch))}, repeats, setting.device)
    torch.distributed.destroy_process_group()
    utilization = [m["throughput/mfu"] for m in seen[2:] if "throughput/mfu" in m]
    mfu = median(utilization) if utilization else None
    return timed["ours"], {**seen[-1], "throughput/mfu": mfu}


# ---- the tables ---------------------------------------------------------------------------------


def comparison_table(what: str, cases: Mapping[str, Setting], repeats: int) -> str:
    """Table of our trainer and the baseline; `what` heads the column of the cases' names."""
    rows = []
    for label, case in cases.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_base_model(case, folder)
            comparison = in_child(compare, case, folder, repeats)
            peaks = {name: in_lean_child(peak_of, case, folder, name) for name in TRAINERS}
        ours, baseline = (comparison.seconds[name] for name in TRAINERS)
        rows.append(
            [
                label,
                spread(ours),
                spread(baseline),
                median(baseline) / median(ours),
                peaks["ours"],
                peaks["baseline"],
                peaks["baseline"] / peaks["ours"],
                f"{comparison.disagreement:.0e}",
            ]
        )
    header = [what, "ours, s", "baseline, s", "time ratio", "ours, GiB", "baseline, GiB"]
    return markdown_table([*header, "memory ratio", "disagreement"], rows)


def batch_line(setting: Setting) -> str:
    """One line on the lengths in the batch and the tokens that each trainer computes."""
    trajectories, _ = ragged_batch(setting)
    lengths, plan = all_lengths(trajectories), our_plan(setting, trajectories)
    trained = sum(len(t.response_ids) for t in trajectories)
    ours = sum(len(token_batch([trajectories[i] for i in members]).tokens) for members in plan)
    columns = max(len(t.prompt_ids) for t in trajectories) + max(
        len(t.response_ids) for t in trajectories
    )
    return (
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in "
        f"all, {trained} trained; {len(plan)} micro-batches. Computed: ours {ours} tokens, "
        f"padded to the longest {len(lengths) * columns}."
    )


def alone_table(setting: Setting, repeats: int) -> str:
    """Table of our trainer alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_child(write_base_model, setting, folder)
        seconds, metrics = in_child(run_alone, setting, folder, repeats)
    trajectories, _ = ragged_batch(setting)
    mfu = metrics["throughput/mfu"]
    flags = ("compile", "activation_checkpointing")
    row = [
        setting.model,
        setting.dtype,
        ", ".join(flag for flag in flags if getattr(setting, flag)) or "-",
        spread(seconds),
        round(sum(all_lengths(trajectories)) / median(seconds)),
        "-" if mfu is None else f"{mfu:.1%}",
        metrics["memory/trainer_peak_gib"],
    ]
    header = ["model", "dtype", "with", "step, s", "tokens/s", "MFU", "peak memory, GiB"]
    return markdown_table(header, [row])


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; fill in `vocabulary` and `repeats`."""
    default = Setting()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smallest vocabulary, one repeat")
    parser.add_argument("--vocabulary", type=int, nargs="+", help="of the tiny model")
    parser.add_argument(
        "--shapes", nargs="*", help=f"tokens of prompt/response; default {' '.join(SHAPES)}"
    )
    parser.add_argument("--repeats", type=int, help="timed steps of each trainer (default 3)")
    parser.add_argument("--model", choices=["tiny", *MODELS], default=default.model)
    parser.add_argument(
        "--alone", action="store_true", help="without the baseline; implied by --model"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default.device)
    parser.add_argument("--dtype", choices=list(DTYPES), default=default.dtype)
    for flag in ("compile", "activation-checkpointing"):
        parser.add_argument(f"--{flag}", action="store_true")
    for name in (
        "sequences",
        "longest-response",
        "tokens-per-micro-batch",
        "logprob-chunk-tokens",
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parsed = parser.parse_args()
    if parsed.vocabulary and parsed.model != "tiny":
        parser.error(f"--vocabulary: given with --model {parsed.model}; allowed: with --model tiny")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda given, but torch finds no GPU; allowed: cpu")
    if parsed.device == "cpu" and parsed.dtype != "fp32":
        parser.error(f"--dtype: {parsed.dtype} given; allowed on a CPU: fp32")
    if parsed.longest_response < SHORTEST_RESPONSE or parsed.sequences < 1:
        parser.error(
            f"--longest-response: allowed: at least {SHORTEST_RESPONSE}; --sequences: at least 1"
        )
    if parsed.shapes is not None:
        parsed.shapes = {name: _shape(parser, name) for name in parsed.shapes or SHAPES}
        if parsed.alone or parsed.model != "tiny":
            parser.error("--shapes: given with --alone or --model; allowed: with the tiny model")
    if parsed.vocabulary is None:
        parsed.vocabulary = list(VOCABULARIES[:1] if parsed.quick else VOCABULARIES)
    if parsed.repeats is None:
        parsed.repeats = 1 if parsed.quick else 3
    return parsed


def _shape(parser: argparse.ArgumentParser, name: str) -> tuple[int, int]:
    prompt, _, response = name.partition("/")
    if not (prompt.isdigit() and response.isdigit() and int(prompt) and int(response) > 1):
        parser.error(f"--shapes: {name} given; allowed: two numbers such as 40/11")
    return int(prompt), int(response)


def main() -> None:
    """Print machine, batch and table."""
    parsed = parse_arguments()
    fields = Setting.__dataclass_fields__.keys() - {"vocabulary", "shape"}
    setting = Setting(**{name: getattr(parsed, name) for name in fields})
    setting = replace(setting, vocabulary=parsed.vocabulary[0])
    sys.stdout.write(f"{machine_line(setting.device)}\n\n")
    if parsed.shapes:
        cases = {name: replace(setting, shape=shape) for name, shape in parsed.shapes.items()}
        lines = (f"{name}: {batch_line(case)}" for name, case in cases.items())
    else:
        cases = {str(size): replace(setting, vocabulary=size) for size in parsed.vocabulary}
        lines = (batch_line(setting),)
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()  # the table takes minutes
    if parsed.alone or setting.model != "tiny":
        table = alone_table(setting, parsed.repeats)
    else:
        what = "prompt / response" if parsed.shapes else "vocabulary"
        table = comparison_table(what, cases, parsed.repeats)
    sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main()

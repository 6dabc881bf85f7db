"""Rungs of the equivalence ladder: each runs a computation in two ways and returns the gap."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from equivalence.plain_loop import plain_loop
from equivalence.roles import (
    FRESH_TRAINERS,
    GENERATOR,
    TRAINER,
    RoleProcess,
    change_options,
    merged_export,
    tiny_arguments,
    tiny_config,
)
from grpo_components.exchange.weights import StateDict
from grpo_components.models.loading import load_whole_model
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean
from grpo_components.objective.losses import GRPOLoss, GSPOLoss, LossInputs
from grpo_components.objective.off_policy import NoCorrection, TokenTIS
from grpo_components.rendezvous import local_rendezvous
from grpo_components.settings import Settings
from grpo_components.trajectory import Trajectory, batch_hash, concatenate, pack

T = TypeVar("T")
WHOLE, SMALL = 100_000, 64
"""Values of `tokens_per_micro_batch`: the whole batch, or about two trajectories per forward."""
SYNCHRONOUS = (
    *("max_staleness=0", "push_every_n_steps=1", "pull_every_m_rollouts=1"),
    *("num_steps=3", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=8"),
    "optimizer.lr=1e-3",  # large, so that different weights change the next responses
)
OBJECTIVES = (
    (GRPOLoss(), TokenMean(), NoCorrection()),
    (GSPOLoss(clip_low=0.2, clip_high=0.2), SequenceMean(), NoCorrection()),
    (GRPOLoss(), ConstantLength(16), TokenTIS()),
)
"""Loss, aggregation and off-policy correction of the compared training steps."""


class Bench:
    """Shares a scratch folder, trainer processes and results between the rungs."""

    def __init__(self, scratch: Path, policy: Path | None = None) -> None:
        self.scratch = scratch
        self.policy = () if policy is None else (f"base_model_path={policy}",)
        self.cfg = tiny_config(scratch / "unused", *SYNCHRONOUS, *self.policy)
        self._ranks: list[RoleProcess] = []
        self._runs: list[Path] = []
        self._results: dict[Any, Any] = {}

    def folder(self) -> Path:
        """Create an empty folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a result that several rungs need; compute it at the first request."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def train(
        self, calls: list[tuple[Any, ...]], num_ranks: int = 1, **changes: Any
    ) -> list[list[Any]]:
        """Build a new trainer of the tiny policy and call its methods on every rank."""
        while len(self._ranks) < num_ranks:
            self._ranks.append(RoleProcess(FRESH_TRAINERS))
        arguments = tiny_arguments(self.cfg)[0].trainer
        arguments.pop("cpu_threads")
        arguments["rendezvous"] = local_rendezvous()
        for rank, process in enumerate(self._ranks[:num_ranks]):
            own = {"num_ranks": num_ranks, "collective_timeout_s": 60.0, **changes}
            process.submit("run", change_options(arguments | {"rank": rank}, **own), calls)
        return [process.result() for process in self._ranks[:num_ranks]]

    def synchronous_run(self, number: int) -> Path:
        """Return the output folder of a recipe run at max_staleness 0; run it at first request."""
        while len(self._runs) <= number:
            output_dir = self.folder() / "run"
            push = "delta" if len(self._runs) % 2 else "whole"
            run(self.command(output_dir, f"push={push}"))
            self._runs.append(output_dir)
        return self._runs[number]

    def command(self, output_dir: Path, *overrides: str) -> list[str]:
        """Return the command line that runs the recipe at max_staleness 0."""
        command = [sys.executable, "-m", "torchtune._cli.tune", "run"]
        command += ["async_grpo_full_finetune_distributed", "--config", "tiny_async_grpo"]
        return [*command, f"output_dir={output_dir}", *SYNCHRONOUS, *self.policy, *overrides]

    def close(self) -> None:
        """End the trainer processes."""
        for process in self._ranks:
            process.close()


def run(command: list[str]) -> None:
    """Run a command and wait for its end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)  # lets the run clean up before Popen waits for it
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output}")


def max_difference(left: StateDict, right: StateDict) -> float:
    """Return the largest absolute difference of two state dicts; 0 only if bit-identical."""
    if left.keys() != right.keys():
        return math.inf
    largest = 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)):
            continue
        gap = float((a.double() - b.double()).abs().max())
        if math.isnan(gap):
            return math.inf
        largest = max(largest, gap, math.ulp(0.0))  # 0.0 and -0.0 differ in their bits
    return largest


def saved_weights(folder: Path) -> StateDict:
    """Read the tensors of a saved policy, by Hugging Face name."""
    return load_file(folder / "model.safetensors")


# ---- the recipe ---------------------------------------------------------------------------------


def recipe_is_plain_loop(bench: Bench) -> float:
    """Compare batches and final weights of the recipe at max_staleness 0 with the plain loop's."""
    run = bench.synchronous_run(0)
    batches, last = plain_loop(bench.cfg, bench.folder())
    if not batches or batch_hashes(run) != [batch_hash(batch) for batch in batches]:
        return math.inf
    return max_difference(saved_weights(run / "checkpoints/latest"), saved_weights(last))


def synchronous_runs_are_identical(bench: Bench) -> float:
    """Compare batches and final weights of two runs of the recipe at max_staleness 0."""
    first, second = bench.synchronous_run(0), bench.synchronous_run(1)
    if not batch_hashes(first) or batch_hashes(first) != batch_hashes(second):
        return math.inf
    latest = "checkpoints/latest"
    return max_difference(saved_weights(first / latest), saved_weights(second / latest))


def batch_hashes(run: Path) -> list[str]:
    """Return the batch hash of each step in a run's receipts, from the step's last attempt."""
    records = [json.loads(line) for line in (run / "receipts.jsonl").open()]
    hashes = {r["step"]: r["batch_hash"] for r in records if "batch_hash" in r}
    return [hashes[step] for step in sorted(hashes)]


# ---- one update ---------------------------------------------------------------------------------


def micro_batched_is_whole_batch(bench: Bench) -> float:
    """Compare the weights after a step on small micro-batches and on one whole batch."""
    return _compare_with_whole_batch(bench, {"tokens_per_micro_batch": SMALL})


def two_ranks_are_one(bench: Bench) -> float:
    """Compare the weights after a step on two FSDP ranks and on one rank."""
    return _compare_with_whole_batch(bench, {"num_ranks": 2, "tokens_per_micro_batch": SMALL})


def _compare_with_whole_batch(bench: Bench, changes: dict[str, Any]) -> float:
    """Return the weight difference to a whole-batch step, relative to its largest weight change."""
    trajectories, advantages = ragged_batch(bench)
    base = saved_weights(Path(bench.cfg.base_model_path))
    worst = 0.0
    for number, (loss, aggregation, off_policy) in enumerate(OBJECTIVES):
        objective = {"loss": loss, "aggregation": aggregation, "off_policy": off_policy}
        step = partial(weights_after_step, bench, trajectories, advantages, **objective)
        whole = bench.once(("whole batch", number), partial(step, tokens_per_micro_batch=WHOLE))
        other = step(**changes)
        worst = max(worst, max_difference(whole, other) / max_difference(whole, base))
    return worst


def weights_after_step(
    bench: Bench, trajectories: list[Trajectory], advantages: np.ndarray, **changes: Any
) -> StateDict:
    """Return the tiny policy's weights after one SGD step; they change by the scaled gradient.

    Args:
        bench: owner of the trainer processes.
        trajectories: S responses.
        advantages: [S] float32.
        changes: trainer arguments that differ from the tiny config.
    """
    sgd = {"build_optimizer": partial(torch.optim.SGD, lr=10.0), "clip_grad_norm": None}
    step = ("train_step", pack(trajectories), advantages, 0)
    calls = [step, ("gather_weights",), ("export_weights", 1)]
    return merged_export(bench.train(calls, **sgd, **changes))


def ragged_batch(bench: Bench) -> tuple[list[Trajectory], np.ndarray]:
    """Return twelve random responses of several lengths, with the tiny policy's noisy logprobs."""
    return bench.once("ragged batch", partial(_ragged_batch, bench))


def _ragged_batch(bench: Bench) -> tuple[list[Trajectory], np.ndarray]:
    model = whole_model(bench)
    rng = np.random.default_rng(0)
    records = []
    for number in range(12):
        size = int(rng.integers(1, 17))
        record = Trajectory(
            prompt_ids=rng.integers(30, 380, rng.integers(1, 13)),
            response_ids=rng.integers(30, 380, size),
            response_mask=np.arange(size) % 5 != 3,
            generator_logprobs=np.zeros(size, np.float32),
            token_versions=np.zeros(size, np.int32),
            prompt_index=number,
            epoch=0,
            group_id=number // 4,
            attempt=0,
            finish_reason="stop",
            temperature=(1.0, 0.7)[number % 2],
        )
        with torch.no_grad():
            own = full_logprobs(model, record).numpy()
        record.generator_logprobs = own + rng.normal(0, 0.15, size).astype(np.float32)
        records.append(record)
    return records, rng.normal(0, 1, len(records)).astype(np.float32)


def whole_model(bench: Bench) -> nn.Module:
    """Load the tiny policy, unsharded."""
    model = tiny_arguments(bench.cfg)[0].trainer["model"]
    return load_whole_model(
        model.build_model, model.build_checkpointer, torch.device("cpu"), "fp32"
    )


def full_logprobs(model: nn.Module, record: Trajectory) -> Tensor:
    """Compute the logprobs [R] of a response from the full logits of every position."""
    ids = torch.from_numpy(np.concatenate([record.prompt_ids, record.response_ids]))
    output = model(ids[None])
    logits = getattr(output, "logits", output)[0].float()
    logprobs = torch.log_softmax(logits / record.temperature, dim=-1)
    return logprobs[torch.arange(len(ids) - 1), ids[1:]][len(record.prompt_ids) - 1 :]


def chunked_is_full_logits(bench: Bench) -> float:
    """Compare logprobs and gradients computed in chunks and from the full logits."""
    records, _ = ragged_batch(bench)
    model = whole_model(bench).requires_grad_(True)
    expected = torch.cat([full_logprobs(model, record) for record in records])
    weights = torch.linspace(-1, 1, len(expected))
    expected_gradients = gradients(model, expected @ weights)
    largest_gradient = max(float(g.abs().max()) for g in expected_gradients.values())
    worst = 0.0
    for chunk_tokens in (1, 7, 10_000):
        logprobs = ResponseLogprobs(model, chunk_tokens=chunk_tokens)(token_batch(records))[0]
        gap = max_difference({"": expected.detach()}, {"": logprobs.detach()})
        found = gradients(model, logprobs @ weights)
        relative = max_difference(expected_gradients, found) / largest_gradient
        worst = max(worst, gap, relative)
    return worst


def gradients(model: nn.Module, value: Tensor) -> StateDict:
    """Compute the gradient of a scalar for each of a model's parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


# ---- generator and weights ----------------------------------------------------------------------


class LogprobGap:
    """Policy-gradient loss that also measures how far generator and trainer logprobs differ."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [N], and the absolute differences of the logprobs [N] in nats."""
        gap = (inputs.trainer_logprobs - inputs.generator_logprobs).detach().abs()
        return -inputs.trainer_logprobs * inputs.advantages, {"gap/max": gap}


def generator_is_trainer(bench: Bench, cfg: Settings | None = None) -> float:
    """Compare logprobs of generator and trainer, with the base weights and after a step."""
    arguments, prompts = tiny_arguments(cfg or bench.cfg)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    trained = change_options(arguments.trainer, loss=LogprobGap(), build_optimizer=optimizer)
    worst = 0.0
    with (
        closing(RoleProcess(GENERATOR, **arguments.generator)) as generator,
        closing(RoleProcess(TRAINER, rank=0, rendezvous=local_rendezvous(), **trained)) as trainer,
    ):
        for step, temperature in enumerate((1.0, 0.7)):
            groups = [
                generator.call("generate_group", *next(prompts), number, 0, temperature)[0]
                for number in range(8)
            ]
            batch = concatenate(groups)
            advantages = np.resize(np.array([1, -1], np.float32), len(batch["group_id"]))
            worst = max(
                worst, trainer.call("train_step", batch, advantages, step).metrics["gap/max"]
            )
            version = trainer.call("gather_weights")
            generator.call("load_weights", version, trainer.call("export_weights", version)[0])
    return worst

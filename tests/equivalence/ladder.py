"""The equivalence ladder: pairs of computations that must agree, and what measures their gaps."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lib.role_process import RoleProcess
from lib.trainer_ranks import Ranks
from lib.trajectories import trajectory
from lib.tune import starter
from lib.whole_runs import succeed
from safetensors.torch import load_file
from torch import Tensor

from equivalence.roles import (
    ENGINE,
    GENERATOR,
    TRAINER,
    change_options,
    tiny_arguments,
    tiny_config,
)
from grpo_components.exchange.weights import StateDict, unpack_buckets
from grpo_components.objective.losses import LossInputs
from grpo_components.rendezvous import local_rendezvous

T = TypeVar("T")
SYNCHRONOUS = (
    *("max_staleness=0", "push_every_n_steps=1", "pull_every_m_rollouts=1"),
    *("num_steps=3", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=8"),
    "optimizer.lr=1e-3",  # large, so that different weights change the next responses
)
_PRELOADED = [each.rpartition(".")[0] for each in (GENERATOR, TRAINER, ENGINE)]


@dataclass(frozen=True)
class Rung:
    """Two computations that must give the same result."""

    name: str
    compared: str
    """What is compared, and the unit of the difference."""
    tolerance: float
    """Largest difference at which the rung holds; 0 means bit-identical."""
    measure: Callable[[Bench], float]
    """Runs both computations and returns their difference."""
    nightly: bool = False
    """Whether it takes long, and other rungs and runs take most of the same way."""

    def holds(self, difference: float) -> bool:
        """Whether a difference is within the tolerance; False for NaN."""
        return difference <= self.tolerance


RUNGS: list[Rung] = []
"""The ladder, in the order of the table."""


def rung(name: str, compared: str, tolerance: float, *, nightly: bool = False) -> Any:
    """Decorator: the function measures a rung of the ladder."""

    def register(measure: Callable[[Bench], float]) -> Callable[[Bench], float]:
        RUNGS.append(Rung(name, compared, tolerance, measure, nightly))
        return measure

    return register


class Bench:
    """Shares a scratch folder, trainer processes, runs and results between the rungs."""

    def __init__(self, scratch: Path, policy: Path | None = None) -> None:
        self.scratch = scratch
        self.policy = () if policy is None else (f"base_model_path={policy}",)
        self.cfg = tiny_config(scratch / "unused", *SYNCHRONOUS, *self.policy)
        self.base = Path(self.cfg.base_model_path)
        self._ranks = Ranks(_PRELOADED)
        self._ending = ExitStack()
        self._ending.callback(self._ranks.close)
        self.tune = self._ending.enter_context(starter(self.base, scratch))
        self._results: dict[Any, Any] = {}

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a result that several rungs need; compute it at the first request."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def process(self, role_class: str, **kwargs: Any) -> RoleProcess:
        return RoleProcess(role_class, preload=_PRELOADED, **kwargs)

    def train(self, calls: list[Any], num_ranks: int = 1, **changes: Any) -> list[list[Any]]:
        """Build a new trainer of the tiny policy and call its methods on every rank."""
        own = tiny_arguments(self.cfg)[0]["trainer"]
        own.pop("cpu_threads")
        own["rendezvous"] = local_rendezvous()
        changes = {"num_ranks": num_ranks, "collective_timeout_s": 60.0, **changes}
        arguments = [change_options(own | {"rank": n}, **changes) for n in range(num_ranks)]
        results: Any = self._ranks.run_with(arguments, calls)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def run(self, *overrides: str) -> Path:
        return succeed(self.tune, *SYNCHRONOUS, *overrides)[1]

    def close(self) -> None:
        self._ending.close()


class LogprobGap:
    """Policy-gradient loss that also measures how far generator and trainer logprobs differ."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        gap = (inputs.trainer_logprobs - inputs.generator_logprobs).detach().abs()
        return -inputs.trainer_logprobs * inputs.advantages, {"gap/max": gap}


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
    return load_file(folder / "model.safetensors")


def merged_export(results: list[list[Any]]) -> StateDict:
    """Merge the weights that all ranks returned from their last call, `export_weights`."""
    return unpack_buckets(rank_results[-1][0] for rank_results in results)


def gradients(model: torch.nn.Module, value: Tensor) -> StateDict:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, retain_graph=True), strict=True))


def random_record(rng: Any, ids: tuple[int, int], prompt: Any, size: int, **fields: Any) -> Any:
    """Return a response of random tokens, every fifth of which is the environment's."""
    mask, versions = np.arange(size) % 5 != 3, np.zeros(size, np.int32)
    own = {"prompt_ids": prompt, "token_versions": versions}
    return trajectory(rng.integers(*ids, size), mask, **own | fields)

"""The real role classes in processes of their own, without Ray, for the equivalence ladder."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from grpo_components import _plugin
from grpo_components.config import preflight
from grpo_components.config.role_arguments import RoleArguments, role_arguments
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import Manifest, StateDict, unpack_bucket
from grpo_components.quiet import quiet_libraries
from grpo_components.replay.schedule import Schedule
from grpo_components.settings import Settings

# Dotted paths, as the recipe has them: each class is imported in its own process only.
GENERATOR = "grpo_components.rollout.generator.Generator"
TRAINER = "grpo_components.training.trainer.Trainer"
FRESH_TRAINERS = "grpo_components.equivalence.roles.FreshTrainers"
ENGINES = "grpo_components.equivalence.roles.Engines"
_ENGINE = "grpo_components.rollout.vllm_engine.VLLMEngine"
Prompts = Iterator[tuple[dict[str, Any], int]]
_SWAP_STEP = 16
"""Engine step before which new weights come under load."""
_CLOSE_S = 30.0
"""How long a process may take to end before it is killed."""


class RoleProcess:
    """One object in a spawned process with the threads and variables that the cluster gives a role.

    Args:
        role_class: dotted path of its class.
        cpu_threads: threads that torch may use there.
        env: environment variables.
        kwargs: of the class.
    """

    def __init__(
        self,
        role_class: str,
        *,
        cpu_threads: int = 1,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._name = role_class.rpartition(".")[2]
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, role_class, cpu_threads, kwargs), name=self._name
        )
        variables = {
            "OMP_NUM_THREADS": str(cpu_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            **(env or {}),
        }
        with _environment(variables):  # OpenMP and vLLM read theirs while they are imported
            self._process.start()
        theirs.close()

    def submit(self, method: str, *args: Any) -> None:
        """Start a call without waiting for it."""
        self._connection.send((method, args))

    def result(self) -> Any:
        """Wait for the oldest call's result.

        Raises:
            RuntimeError: with what went wrong in the process.
        """
        try:
            succeeded, value = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process died") from None
        if not succeeded:
            raise RuntimeError(f"{self._name} failed:\n{value}")
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait for its result."""
        self.submit(method, *args)
        return self.result()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it is dead
            self._connection.send(None)
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    connection: Connection, role_class: str, cpu_threads: int, kwargs: dict[str, Any]
) -> None:
    """The process's main function: build the object, then answer calls until there are no more."""
    quiet_libraries("WARNING")
    torch.set_num_threads(cpu_threads)
    role: Any = None
    with tempfile.TemporaryFile() as log, contextlib.suppress(EOFError):
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        try:
            role = _find(role_class)(**kwargs)
            built = ""
        except Exception:  # told in the answer to the first call
            built = traceback.format_exc()
        while (call := connection.recv()) is not None:
            method, args = call
            try:
                if built:
                    raise RuntimeError(built)
                value = getattr(role, method)(*args)
                answer = True, asyncio.run(value) if inspect.iscoroutine(value) else value
            except Exception:  # whatever it is, the caller raises it
                answer = False, traceback.format_exc()
            connection.send(answer)
    if hasattr(role, "close"):
        role.close()


def _find(dotted_path: str) -> Any:
    module, _, name = dotted_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- what the recipe hands to the roles ---------------------------------------------------------


def tiny_config(output_dir: Path, *overrides: str) -> Settings:
    """The checked config `tiny_async_grpo`, with overrides as on the command line.

    Args:
        output_dir: of the run.
        overrides: `key=value`.
    """
    cfg = OmegaConf.load(_plugin.recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    changes = OmegaConf.from_dotlist([f"output_dir={output_dir}", *overrides])
    return preflight.check(cast(DictConfig, OmegaConf.merge(cfg, changes)))


def tiny_arguments(cfg: Settings, rendezvous: Path) -> tuple[RoleArguments, Prompts]:
    """What the recipe hands to the roles, and the prompts in its order.

    Args:
        cfg: checked by preflight; without a reference.
        rendezvous: file through which the trainer ranks find each other.

    Returns:
        The arguments of `RoleProcess`, but for a trainer's rank; and endless (prompt, epoch) pairs.
    """
    tokenizer = config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset, tokenizer)
    held_out = config.instantiate(cfg.eval_dataset, tokenizer)
    prompts = PromptStream(dataset, shuffle=cfg.shuffle, seed=cfg.seed)
    objective = ("loss", "aggregation", "off_policy")
    arguments = role_arguments(
        cfg,
        contract=StalenessContract(cfg.max_staleness, cfg.groups_per_step),
        objective={key: config.instantiate(getattr(cfg, key)) for key in objective},
        num_references=0,
        stop_tokens=tokenizer.stop_tokens,
        longest_prompt=max(dataset.max_prompt_length, held_out.max_prompt_length),
        rendezvous=str(rendezvous),
    )
    for own in (arguments.trainer, arguments.generator):
        for key in (
            "num_gpus",
            "min_living",
            "schedule_folder",
            "numbered_lives",
        ):
            own.pop(key, None)
    return arguments, prompts


# ---- what runs in the processes -----------------------------------------------------------------


class FreshTrainers:
    """Builds a trainer rank for every job, so that nothing of the job before is left."""

    def run(self, arguments: dict[str, Any], calls: list[tuple[Any, ...]]) -> list[Any]:
        """Make calls on a new trainer rank.

        Args:
            arguments: of the trainer.
            calls: method and arguments of each.

        Returns:
            What each call returned.
        """
        trainer = _find(TRAINER)(**arguments)
        try:
            return [getattr(trainer, method)(*args) for method, *args in calls]
        finally:
            trainer.close()


class Engines:
    """Samples from vLLM engines, one after the other."""

    def sample(
        self, model_path: str, bucket: tuple[Manifest, Any] | None, prompts: list[list[int]]
    ) -> list[Any]:
        """Completions by a new engine.

        Args:
            model_path: what the engine is loaded with.
            bucket: weights to swap in after it has answered the prompts once; None keeps its own.
            prompts: tokens of each.
        """
        with closing(self._engine(model_path)) as engine:
            if bucket is not None:
                _results(_ask(engine, prompts))  # fills the prefix cache, which the swap must empty
                engine.load_weights(1, unpack_bucket(*bucket)).result()
            return _results(_ask(engine, prompts))

    def sample_under_load(
        self, model_path: str, bucket: tuple[Manifest, Any], prompts: list[list[int]]
    ) -> tuple[list[Any], list[Any]]:
        """Completions by an engine that got new weights while the same prompts were running.

        Args:
            model_path: what the engine is loaded with.
            bucket: weights to swap in.
            prompts: tokens of each.

        Returns:
            What was asked after the swap, and what was running over it until the former was done.
        """
        # The swap lies between two steps of the first requests, and the others come with it.
        names = [str(number) for number in range(len(prompts))]
        entries = [(0, f"running {name}") for name in names]
        entries += [(_SWAP_STEP, "weights 1"), *((_SWAP_STEP, f"new {name}") for name in names)]
        schedule = Schedule(recorded=entries, timeout_s=_CLOSE_S)
        with closing(self._engine(model_path, schedule)) as engine:
            running = _ask(engine, prompts, "running", max_tokens=2 * _SWAP_STEP + 32)
            loading = engine.load_weights(1, unpack_bucket(*bucket))
            new = _results(_ask(engine, prompts, "new"))
            loading.result()
            return new, _results(running)

    def _engine(self, model_path: str, schedule: Any = None) -> Any:
        return _find(_ENGINE)(
            model_path,
            device="cpu",
            dtype="fp32",
            max_model_len=256,
            max_num_seqs=64,
            gpu_memory_utilization=0.5,
            enforce_eager=True,
            recompute_kv_after_pull=False,
            seed=0,
            schedule=schedule,
        )


def _ask(
    engine: Any, prompts: list[list[int]], name: str = "prompt", max_tokens: int = 32
) -> list[Any]:
    return [
        engine.submit(
            prompt,
            max_tokens=max_tokens,
            temperature=1.0,
            seed=number,
            stop_token_ids=[0] if name != "running" else [],
            name=f"{name} {number}",
        )
        for number, prompt in enumerate(prompts)
    ]


def _results(futures: list[Any]) -> list[Any]:
    return [future.result() for future in futures]


def exported(results: list[list[Any]]) -> StateDict:
    """The weights that all ranks' last call, `export_weights`, brought out together.

    Args:
        results: what each rank's `run` returned.
    """
    weights: StateDict = {}
    for rank_results in results:
        bucket, _ = rank_results[-1]
        weights |= unpack_bucket(*bucket)
    return weights

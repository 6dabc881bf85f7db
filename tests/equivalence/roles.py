"""Runs the real generator, trainer and engine without Ray, for the equivalence ladder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from grpo_components import _plugin
from grpo_components.config import preflight
from grpo_components.config.objective import build_penalties
from grpo_components.config.role_arguments import RoleArguments, role_arguments
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import Manifest, StateDict, unpack_bucket
from grpo_components.models.lora import LoraOptions
from grpo_components.objective.losses import GRPOLoss
from grpo_components.quiet import quiet_libraries
from grpo_components.replay.schedule import Schedule
from grpo_components.rollout.engine_environment import engine_environment
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.settings import Settings
from grpo_components.training.trainer_options import ObjectiveOptions

# Dotted paths, so that the classes are imported only where they run.
GENERATOR = "grpo_components.rollout.generator.Generator"
TRAINER = "grpo_components.training.trainer.Trainer"
FRESH_TRAINERS = "equivalence.roles.FreshTrainers"
ENGINES = "equivalence.roles.Engines"
_ENGINE = "grpo_components.rollout.vllm_engine.VLLMEngine"
_PRELOADED = [path.rpartition(".")[0] for path in (GENERATOR, TRAINER, _ENGINE)]
_SERVER_ENVIRONMENT = {  # as the cluster sets it; OpenMP and vLLM read it at import
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    **engine_environment("cpu", "WARNING"),
}
Prompts = Iterator[tuple[dict[str, Any], int]]
_SWAP_STEP = 16
"""Engine step before which `Engines.sample_under_load` swaps in the new weights."""
_CLOSE_TIMEOUT_S = 30.0
"""Seconds that a process has to end before it is killed."""


class RoleProcess:
    """Runs an object in a process of its own, forked from a server that has imported the roles."""

    def __init__(self, role_class: str, *, cpu_threads: int = 1, **kwargs: Any) -> None:
        self._name = role_class.rpartition(".")[2]
        # Python starts the server with the first process, and then keeps it: importing torch and
        # vLLM takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_end, role_class, cpu_threads, kwargs), name=self._name
        )
        with _environment(_SERVER_ENVIRONMENT):
            self._process.start()
        child_end.close()

    def submit(self, method: str, *args: Any) -> None:
        """Start a call without waiting for its result."""
        self._connection.send((method, args))

    def result(self) -> Any:
        """Wait for the result of the oldest submitted call."""
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
        with contextlib.suppress(BrokenPipeError):  # the process is dead
            self._connection.send(None)
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    connection: Connection, role_class: str, cpu_threads: int, kwargs: dict[str, Any]
) -> None:
    """Build the object, then answer calls until None arrives; runs in the forked process."""
    os.environ.update(_SERVER_ENVIRONMENT)  # the server may have been started for other processes
    quiet_libraries("WARNING")
    torch.set_num_threads(cpu_threads)
    role: Any = None
    with tempfile.TemporaryFile() as log, contextlib.suppress(EOFError):
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        try:
            role = _import_object(role_class)(**kwargs)
            build_error = ""
        except Exception:  # sent as the answer to the first call
            build_error = traceback.format_exc()
        while (call := connection.recv()) is not None:
            method, args = call
            try:
                if build_error:
                    raise RuntimeError(build_error)
                value = getattr(role, method)(*args)
                answer = True, asyncio.run(value) if inspect.iscoroutine(value) else value
            except Exception:  # re-raised by the caller
                answer = False, traceback.format_exc()
            connection.send(answer)
    if hasattr(role, "close"):
        role.close()


def _import_object(dotted_path: str) -> Any:
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


# ---- arguments of the roles ---------------------------------------------------------------------


def tiny_config(output_dir: Path, *overrides: str) -> Settings:
    """Return the config `tiny_async_grpo` with overrides, checked by preflight."""
    cfg = OmegaConf.load(_plugin.recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    changes = OmegaConf.from_dotlist([f"output_dir={output_dir}", *overrides])
    return preflight.check(cast(DictConfig, OmegaConf.merge(cfg, changes)))


def tiny_arguments(cfg: Settings) -> tuple[RoleArguments, Prompts]:
    """Return the arguments that the recipe gives its roles, and its prompts in order."""
    tokenizer = config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset, tokenizer)
    assert cfg.eval_dataset is not None, "the tiny config has one"
    held_out = config.instantiate(cfg.eval_dataset, tokenizer)
    prompts = PromptStream(dataset, shuffle=cfg.shuffle, seed=cfg.seed)
    # Not the recipe's grpo_loss but a second implementation, which must give identical bits.
    loss = GRPOLoss(cfg.loss.clip_low, cfg.loss.clip_high)
    arguments = role_arguments(
        cfg,
        contract=StalenessContract(cfg.max_staleness, cfg.groups_per_step),
        objective=ObjectiveOptions(
            loss=loss,
            penalties=build_penalties(cfg),
            aggregation=config.instantiate(cfg.aggregation),
            off_policy=config.instantiate(cfg.off_policy),
        ),
        num_references=0,
        tokenizer=tokenizer,
        longest_prompt=max(dataset.max_prompt_length, held_out.max_prompt_length),
    )
    for own in (arguments.trainer, arguments.generator):
        for key in ("num_gpus", "meets", "min_living", "replay", "counts_restarts", "env"):
            own.pop(key, None)
    return arguments, prompts


def change_options(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a role's arguments with some arguments, or fields of its option records, replaced."""
    changed = dict(arguments)
    for name, value in changes.items():
        if name in changed:
            changed[name] = value
            continue
        (owner,) = (key for key, record in changed.items() if name in _field_names(record))
        changed[owner] = replace(changed[owner], **{name: value})
    return changed


def _field_names(record: Any) -> set[str]:
    return {field.name for field in fields(record)} if is_dataclass(record) else set()


# ---- what runs in the processes -----------------------------------------------------------------


class FreshTrainers:
    """Builds a new trainer rank for every job, so that jobs share no state."""

    def run(self, arguments: dict[str, Any], calls: list[tuple[Any, ...]]) -> list[Any]:
        """Call methods of a new trainer rank."""
        trainer = _import_object(TRAINER)(**arguments)
        try:
            return [getattr(trainer, method)(*args) for method, *args in calls]
        finally:
            trainer.close()


class Engines:
    """Samples from vLLM engines, a new one for every call."""

    def __init__(self) -> None:
        # vLLM collects garbage several times around each engine. Leave out what is imported.
        _import_object(_ENGINE)
        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = _leave_frozen

    def sample(
        self, model_path: str, bucket: tuple[Manifest, Any] | None, prompts: list[list[int]]
    ) -> list[Any]:
        """Sample completions from a new engine."""
        with closing(self._engine(model_path)) as engine:
            if bucket is not None:
                _results(
                    _submit_all(engine, prompts)
                )  # fills the prefix cache; the swap must clear it
                engine.load_weights(1, unpack_bucket(*bucket)).result()
            return _results(_submit_all(engine, prompts))

    def sample_under_load(
        self,
        model_path: str,
        bucket: tuple[Manifest, Any],
        prompts: list[list[int]],
        num_workers: int = 1,
        lora: LoraOptions | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Sample from a new engine whose weights are swapped while requests are running."""
        # The schedule starts the running requests, swaps before a later step, then adds the rest.
        names = [str(number) for number in range(len(prompts))]
        entries = [(0, f"running {name}") for name in names]
        entries += [(_SWAP_STEP, "weights 1"), *((_SWAP_STEP, f"new {name}") for name in names)]
        schedule = Schedule(recorded=entries, timeout_s=_CLOSE_TIMEOUT_S)
        with closing(self._engine(model_path, schedule, num_workers, lora)) as engine:
            running = _submit_all(engine, prompts, "running", max_tokens=2 * _SWAP_STEP + 32)
            loading = engine.load_weights(1, unpack_bucket(*bucket))
            new = _results(_submit_all(engine, prompts, "new"))
            loading.result()
            return new, _results(running)

    def _engine(
        self,
        model_path: str,
        schedule: Any = None,
        num_workers: int = 1,
        lora: LoraOptions | None = None,
    ) -> Any:
        registry = _import_object("vllm.model_executor.models.ModelRegistry")
        for name in json.loads((Path(model_path) / "config.json").read_text())["architectures"]:
            # Inspected in this process: vLLM would start another for each, which takes seconds.
            registry.register_model(name, registry.models[name].load_model_cls())
        options = EngineOptions(
            model_path=model_path,
            device="cpu",
            dtype="fp32",
            max_model_len=256,
            max_num_seqs=64,
            gpu_memory_utilization=0.5,
            kv_cache_gib=1 / 16,  # its zeros take longer than the sampling
            enforce_eager=True,
            recompute_kv_after_pull=False,
            tensor_parallel_size=num_workers,
            lora=lora,
        )
        return _import_object(_ENGINE)(options, seed=0, schedule=schedule)


def _leave_frozen() -> None:
    """Replace `gc.freeze` and `gc.unfreeze`: engines are collected, imported modules are not."""


def _submit_all(
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


def merged_export(results: list[list[Any]]) -> StateDict:
    """Merge the weights that all ranks returned from their last call, `export_weights`."""
    weights: StateDict = {}
    for rank_results in results:
        bucket, _ = rank_results[-1]
        weights |= unpack_bucket(*bucket)
    return weights

"""Arguments of the real generator and trainer, and engines to sample from, for the ladder."""

import gc
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from lib.role_process import imported
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from grpo_components import _plugin
from grpo_components.config import preflight
from grpo_components.config.objective import build_penalties
from grpo_components.config.start_roles import role_arguments
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import Manifest, unpack_buckets
from grpo_components.objective.losses import GRPOLoss
from grpo_components.objective.objective import TrainedObjective
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.rollout.schedule import Schedule
from grpo_components.settings import GeneratorSettings, LoraSettings, Settings, processes_of
from grpo_tools.replay.recorded_run import RecordedSchedule

# Dotted paths, so that the classes are imported only where they run.
GENERATOR = "grpo_components.rollout.generator.Generator"
TRAINER = "grpo_components.training.trainer.Trainer"
ENGINES = "equivalence.roles.Engines"
ENGINE = "grpo_components.rollout.engine.open_engine"
Prompts = Iterator[tuple[dict[str, Any], int]]
_SWAP_STEP = 16
"""Engine step before which `Engines.sample_under_load` swaps in the new weights."""
_TIMEOUT_S = 30.0


def tiny_config(output_dir: Path, *overrides: str) -> Settings:
    cfg = OmegaConf.load(_plugin.recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    changes = OmegaConf.from_dotlist(
        [f"output_dir={output_dir}", "generator.backend=vllm", *overrides]
    )
    return preflight.read_config(cast(DictConfig, OmegaConf.merge(cfg, changes)))


def tiny_arguments(cfg: Settings) -> tuple[dict[str, dict[str, Any]], Prompts]:
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
        processes_of(cfg, needs_reference=False),
        contract=StalenessContract(cfg.max_staleness, cfg.groups_per_step),
        objective=TrainedObjective(
            loss=loss,
            penalties=build_penalties(cfg),
            aggregation=config.instantiate(cfg.aggregation),
            off_policy=config.instantiate(cfg.off_policy),
        ),
        tokenizer=tokenizer,
        longest_prompt=max(dataset.max_prompt_length, held_out.max_prompt_length),
    )
    for own in (arguments["trainer"], arguments["generator"]):
        of_spawn = "num_gpus", "meets", "restarts_alone", "min_living", "counts_restarts", "env"
        for key in (*of_spawn, "open_schedule"):
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


class Engines:
    """Samples from engines, a new one for every call."""

    def __init__(self) -> None:
        # vLLM collects garbage several times around each engine. Leave out what is imported.
        imported(ENGINE)
        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = _leave_frozen

    def sample(
        self, model_path: str, bucket: tuple[Manifest, Any] | None, prompts: list[list[int]]
    ) -> list[Any]:
        with closing(self._engine(model_path)) as engine:
            if bucket is not None:
                # This fills the prefix cache, which the swap must clear.
                _results(_submit_all(engine, prompts))
                engine.load_weights(1, unpack_buckets([bucket])).result()
            return _results(_submit_all(engine, prompts))

    def sample_greedily(
        self,
        model_path: str,
        bucket: tuple[Manifest, Any],
        prompts: list[list[int]],
        backend: str,
    ) -> list[list[Any]]:
        """Sample before and after a swap, by a backend that may sample 200 of the ids."""
        with closing(self._engine(model_path, backend=backend, num_ids=200)) as engine:
            before = _results(_submit_all(engine, prompts, max_tokens=40, temperature=0.0))
            engine.load_weights(1, unpack_buckets([bucket])).result()
            after = _results(_submit_all(engine, prompts, max_tokens=40, temperature=0.0))
            return [before, after]

    def sample_under_load(
        self, model_path: str, bucket: tuple[Manifest, Any], prompts: list[list[int]], *more: Any
    ) -> tuple[list[Any], list[Any]]:
        """Sample from a new engine whose weights are swapped while requests are running.

        The number of its workers and the settings of its adapters may be given.
        """
        # The schedule starts the running requests, swaps before a later step, then adds the rest.
        names = [str(number) for number in range(len(prompts))]
        entries = [(0, f"running {name}") for name in names]
        entries += [(_SWAP_STEP, "weights 1"), *((_SWAP_STEP, f"new {name}") for name in names)]
        schedule = Schedule(recorded=RecordedSchedule(entries, _TIMEOUT_S))
        with closing(self._engine(model_path, schedule, *more)) as engine:
            running = _submit_all(engine, prompts, "running", max_tokens=2 * _SWAP_STEP + 32)
            loading = engine.load_weights(1, unpack_buckets([bucket]))
            new = _results(_submit_all(engine, prompts, "new"))
            loading.result()
            return new, _results(running)

    def _engine(
        self,
        model_path: str,
        schedule: Any = None,
        num_workers: int = 1,
        lora: LoraSettings | None = None,
        backend: str = "vllm",
        num_ids: int | None = None,
    ) -> Any:
        registry = imported("vllm.model_executor.models.ModelRegistry")
        for name in json.loads((Path(model_path) / "config.json").read_text())["architectures"]:
            # Inspected in this process: vLLM would start another for each, which takes seconds.
            registry.register_model(name, registry.models[name].load_model_cls())
        limits: dict[str, Any] = {
            "max_response_tokens": 64,
            "max_model_len": 256,
            "max_num_seqs": 64,
        }
        limits |= {"kv_cache_gib": 1 / 16}  # its zeros take longer than the sampling
        limits |= {"temperature": 1.0, "tensor_parallel_size": num_workers, "backend": backend}
        settings = GeneratorSettings.model_validate(limits)
        given = {"model_path": model_path, "device": "cpu", "dtype": "fp32", "lora": lora}
        options = EngineOptions(**given, recompute_kv_after_pull=False, num_ids=num_ids)
        return imported(ENGINE)(settings, options, seed=0, schedule=schedule)


def _leave_frozen() -> None:
    """Replace `gc.freeze` and `gc.unfreeze`: engines are collected, imported modules are not."""


def _submit_all(
    engine: Any,
    prompts: list[list[int]],
    name: str = "prompt",
    max_tokens: int = 32,
    temperature: float = 1.0,
) -> list[Any]:
    options = {"max_tokens": max_tokens, "temperature": temperature}
    options |= {"stop_token_ids": [0] if name != "running" else []}
    return [
        engine.submit(prompt, seed=number, name=f"{name} {number}", **options)
        for number, prompt in enumerate(prompts)
    ]


def _results(futures: list[Any]) -> list[Any]:
    return [future.result() for future in futures]

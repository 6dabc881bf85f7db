"""Saves and restores the trainer: Hugging Face weights, and state that DCP can reshard.

DCP is `torch.distributed.checkpoint`; a different number of ranks can load its state.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_components.errors import ConfigError
from grpo_components.models.lora import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    adapter_tensors,
    peft_config,
)
from grpo_components.settings import LoraSettings
from grpo_components.state_files import read_state, write_state

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Name endings of the base model's files that hold or list its weights."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions()
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Leaves out frozen weights, which the base model's folder has."""
_ANOTHER = "another checkpoint of the run"


class TrainerState:
    """Saves and restores one trainer rank: master weights, optimizer, scheduler, random state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None,
        base_model_path: Path,
        rank: int,
        num_ranks: int,
        device: torch.device,
        lora: LoraSettings | None = None,
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, lr_scheduler
        self._lora = lora
        self._base_model_path, self._rank, self._num_ranks = base_model_path, rank, num_ranks
        self._device = device
        # A separate process group, because `write` may run in another thread during the next step.
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._held: tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]] | None = None

    def hold(self, policy_version: int, layers: Iterable[dict[str, Tensor]], *, copy: bool) -> None:
        """Keep the rank's current state until `write`; collective, to be called between steps.

        With `copy`, the state is copied to CPU memory, so that training may go on before `write`.
        """
        weights: dict[str, Tensor] = {}
        for tensors in layers:
            if self._rank == 0:
                weights |= {name: t.to("cpu", copy=copy) for name, t in tensors.items()}
        states = self._random_states()
        tensors = _named(*self._model_and_moments(bool(self._optimizer.state)))
        tensors |= {f"random.{self._rank}.{kind}": t for kind, t in states.items()}
        if copy:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        plain = {
            "policy_version": policy_version,
            "num_ranks": self._num_ranks,
            "learning_rates": [
                {"lr": float(group["lr"]), "configured": _configured(group)}
                for group in self._optimizer.param_groups
            ],
            "scheduler": self._scheduler and self._scheduler.state_dict(),
        }
        self._held = tensors, plain, weights

    def write(self, folder: Path) -> str | None:
        """Write what `hold` kept; return any error's text. One thread of each rank must call it."""
        assert self._held is not None, "nothing is held"
        (tensors, plain, weights), self._held = self._held, None
        try:
            self._write_tensors(folder / "state" / "trainer", tensors)
            if self._rank == 0:
                write_state(folder / "state", "trainer", plain)
                if self._lora is not None:
                    adapter = adapter_tensors(weights)
                    save_adapter(adapter, self._lora, self._base_model_path, folder)
                    weights = {n: tensor for n, tensor in weights.items() if n not in adapter}
                if weights:
                    save_hf_weights(weights, self._base_model_path, folder)
        except (OSError, SafetensorError) as error:
            return str(error)
        except CheckpointException as error:  # a BaseException; its cause tells if a disk is full
            failure = next(iter(error.failures.values()))[0]
            cause = failure.__cause__ or failure.__context__ or failure
            return f"{type(cause).__name__}: {cause}".splitlines()[0]
        return None

    def _write_tensors(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP itself calls deprecated functions
            save(tensors, storage_writer=FileSystemWriter(folder), process_group=self._group)

    def load(self, folder: Path) -> int:
        """Restore a checkpoint of any number of ranks; return its policy version; collective.

        The optimizer keeps the settings it was built with. If its configured learning rate differs
        from that of the saved run, all saved rates are multiplied by the ratio, new to old.
        """
        plain = read_state(folder / "state", "trainer")
        reader = FileSystemReader(folder / "state" / "trainer")
        saved = reader.read_metadata().state_dict_metadata
        has_moments = any(name.startswith("optimizer.") for name in saved)
        weights, moments = self._model_and_moments(has_moments)
        tensors = _named(weights, moments)
        owner = self._rank % plain["num_ranks"]
        states = {f"random.{owner}.{kind}": t for kind, t in self._random_states().items()}
        states = {name: torch.empty_like(t) for name, t in states.items() if name in saved}
        try:
            # In place: `weights` and `moments` have the same tensors.
            load(tensors | states, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:  # a BaseException, which names process ids
            why = str(next(iter(error.failures.values()))[0]).splitlines()[0]
            problem = f"{folder} cannot be loaded: {why}"
            raise ConfigError("resume_from_checkpoint", problem, _ANOTHER) from error
        for name, tensor in tensors.items():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if type(part) not in (Tensor, nn.Parameter):
                part = part.dequantize()  # torchao's 8-bit moments have no `isfinite`
            if not part.isfinite().all():
                problem = f"{folder}: {name} is not finite"
                raise ConfigError("resume_from_checkpoint", problem, _ANOTHER)
        options = _WHOLE if self._lora is None else _TRAINED
        set_model_state_dict(self._model, weights, options=options)
        if moments:
            set_optimizer_state_dict(self._model, self._optimizer, moments, options=_FLAT)
        for name, state in states.items():
            if name.endswith(".cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self._device)
        self._restore_learning_rates(plain)
        return plain["policy_version"]

    def _restore_learning_rates(self, plain: dict[str, Any]) -> None:
        ratios = []
        for group, saved in zip(self._optimizer.param_groups, plain["learning_rates"], strict=True):
            before = saved["configured"]  # may be 0 if a schedule sets the rate at each step
            ratios.append(_configured(group) / before if before else 1.0)
            set_learning_rate(group, saved["lr"] * ratios[-1])
        assert (self._scheduler is None) == (plain["scheduler"] is None), "preflight checks it"
        if self._scheduler is not None:
            self._scheduler.load_state_dict(_scaled(plain["scheduler"], ratios))

    def _model_and_moments(self, has_moments: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        weights = get_model_state_dict(self._model, options=_TRAINED)
        if not has_moments:  # DCP would run an optimizer step to fill an empty state
            return weights, {}
        return weights, get_optimizer_state_dict(self._model, self._optimizer, options=_FLAT)

    def _random_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states


def save_adapter(
    adapter: dict[str, Tensor], lora: LoraSettings, base_model_path: Path, checkpoint: Path
) -> None:
    """Write a checkpoint's folder `adapter`, which peft and vLLM can load."""
    folder = checkpoint / ADAPTER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in adapter.items()}
    save_file(contiguous, folder / ADAPTER_FILE, metadata={"format": "pt"})
    described = json.dumps(peft_config(lora, str(base_model_path)), indent=2)
    (folder / "adapter_config.json").write_text(described, encoding="utf-8")


def save_hf_weights(state_dict: dict[str, Tensor], base_model_path: Path, folder: Path) -> None:
    """Write a folder that `transformers` and vLLM load: sharded safetensors, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state_dict, folder, max_shard_size="5GB")
    for file in base_model_path.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    config = folder / "config.json"
    if config.is_file():
        described = json.loads(config.read_text(encoding="utf-8"))
        sizes: Counter[torch.dtype] = Counter()
        for tensor in state_dict.values():
            sizes[tensor.dtype] += tensor.numel()
        _set_dtype(described, str(sizes.most_common(1)[0][0]).removeprefix("torch."))
        config.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a config and its nested configs, as `dtype` and (older) `torch_dtype`."""
    config.setdefault("dtype", dtype)
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = dtype
        elif isinstance(value, dict) and {"dtype", "torch_dtype"} & value.keys():
            _set_dtype(value, dtype)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group."""
    if isinstance(group["lr"], Tensor):  # torchao's rejects a float
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _configured(group: dict[str, Any]) -> float:
    """Return a parameter group's configured learning rate; schedulers keep it as `initial_lr`."""
    return float(group.get("initial_lr", group["lr"]))


def _scaled(state: Any, ratios: list[float]) -> Any:
    """Return a scheduler's state, with the learning rates of group i multiplied by `ratios[i]`."""
    if isinstance(state, list):
        return [_scaled(item, ratios) for item in state]
    if not isinstance(state, dict):
        return state
    return {
        key: [rate * ratio for rate, ratio in zip(value, ratios, strict=True)]
        if key in ("base_lrs", "_last_lr")
        else _scaled(value, ratios)
        for key, value in state.items()
    }


def _named(weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Tensor]:
    """Return only the tensors of model and optimizer, by prefixed name: DCP would pickle the rest.

    A learning rate, which torchao keeps as a tensor, is left out: it comes from the config.
    """
    return {
        f"{prefix}.{name}": value
        for prefix, values in (("model", weights), ("optimizer", moments))
        for name, value in values.items()
        if isinstance(value, Tensor) and not name.startswith("param_groups.")
    }

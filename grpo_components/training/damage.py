"""Reads a checkpoint before a run resumes from it, and says what is damaged."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from grpo_components.state_files import FORMAT, read_state

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, pickle.UnpicklingError, SafetensorError, OmegaConfBaseException),
    *(YAMLError, MemoryError),
)
"""What readers raise for bytes that they did not write."""


class DamagedError(Exception):
    """A file of a checkpoint is missing, cannot be read, or holds what cannot be trained on."""


def damage(checkpoint: Path) -> str | None:
    """Say what is damaged in a checkpoint; None if a run can resume from it.

    Of the optimizer's state only the size is checked: it is twice as large as the weights, and the
    trainers check it when they load it.
    """
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    return _damage(checkpoint, tuple((f, f.stat().st_size, f.stat().st_mtime_ns) for f in files))


@lru_cache
def _damage(checkpoint: Path, _files: tuple[Any, ...]) -> str | None:
    """Remember the answer for as long as no file changes: it is asked for several times."""
    try:
        _read(checkpoint)
    except DamagedError as error:
        return str(error)
    return None


def _read(checkpoint: Path) -> None:
    from grpo_components.training.checkpoint import MetadataReader  # imports torchtune

    state, trainer = checkpoint / "state", checkpoint / "state" / "trainer"
    with _named(checkpoint, "state/config.yaml"):
        OmegaConf.load(state / "config.yaml")
    for name in ("driver", "trainer", "buffer"):
        with _named(checkpoint, f"state/{name}.json or .npz"):
            content = read_state(state, name)
            if name == "driver" and content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, and this version reads {FORMAT}")
            if name == "driver" and type(content["ledger"]["steps_done"]) is not int:
                raise TypeError("its steps_done is no whole number")
    with _named(checkpoint, "state/trainer/.metadata"):
        stored = MetadataReader(trainer).read_metadata().storage_data or {}
    for index, part in stored.items():
        shard = trainer / part.relative_path
        with _named(checkpoint, f"state/trainer/{part.relative_path}"), shard.open("rb") as file:
            if shard.stat().st_size < part.offset + part.length:
                raise EOFError(f"it ends after {shard.stat().st_size:,} bytes")
            if index.fqn.startswith("model."):
                file.seek(part.offset)
                piece = io.BytesIO(file.read(part.length))
                if not torch.load(piece, map_location="cpu", weights_only=True).isfinite().all():
                    raise ValueError(f"{index.fqn.removeprefix('model.')} is not finite")
    for weights in checkpoint.rglob("*.safetensors"):
        with _named(checkpoint, str(weights.relative_to(checkpoint))):
            safe_open(weights, framework="pt")  # compares the file's size with its header


@contextlib.contextmanager
def _named(checkpoint: Path, file: str) -> Iterator[None]:
    """Context manager: turn what a reader raises into a `DamagedError` with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(checkpoint)
        raise DamagedError(f"{missing} is missing") from error
    except UNREADABLE as error:
        why = (str(error).splitlines() or [""])[0]
        raise DamagedError(f"{file} cannot be used: {type(error).__name__}: {why}") from error

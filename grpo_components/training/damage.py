"""Reads a checkpoint before a run resumes from it, and says what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors import safe_open

from grpo_components.state_files import FORMAT, read_state


def damage(checkpoint: Path) -> str | None:
    """Return what is damaged in a checkpoint; None if a run can resume from it.

    Of weights and optimizer state, only the sizes are checked; the trainers check the values.
    """
    for name, read in _readers(checkpoint):
        try:
            read()
        except FileNotFoundError as error:
            return f"{Path(error.filename).relative_to(checkpoint)} is missing"
        except Exception as error:  # a reader of bytes that it did not write raises anything
            why = (str(error).splitlines() or [""])[0]
            return f"{name} cannot be used: {type(error).__name__}: {why}"
    return None


def _readers(checkpoint: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield functions that read the parts of a checkpoint, with the names of their files."""
    state = checkpoint / "state"
    yield "state/config.yaml", partial(OmegaConf.load, state / "config.yaml")
    for name in ("driver", "trainer", "buffer"):
        yield f"state/{name}.json or .npz", partial(_check_state, state, name)
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes seconds

    reader = FileSystemReader(state / "trainer")
    yield "state/trainer/.metadata", reader.read_metadata
    for part in (reader.read_metadata().storage_data or {}).values():
        yield f"state/trainer/{part.relative_path}", partial(_check_size, state / "trainer", part)
    for weights in checkpoint.rglob("*.safetensors"):
        # It compares the file's size with its header.
        name = str(weights.relative_to(checkpoint))
        yield name, partial(safe_open, weights, framework="pt")


def _check_state(state: Path, name: str) -> None:
    content = read_state(state, name)
    if name == "driver" and content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, and this version reads {FORMAT}")
    if name == "driver" and type(content["ledger"]["steps_done"]) is not int:
        raise TypeError("its steps_done is no whole number")


def _check_size(folder: Path, part: Any) -> None:
    size = (folder / part.relative_path).stat().st_size
    if size < part.offset + part.length:
        raise EOFError(f"it ends after {size:,} bytes")

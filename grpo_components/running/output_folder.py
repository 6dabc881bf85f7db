"""The folder of a run: made fresh, with the resolved config in it, and never overwritten."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TextIO

from omegaconf import DictConfig, OmegaConf

from grpo_components.exchange.line_files import cut_torn_line


def prepare_output_folder(output_dir: str, cfg: DictConfig) -> Path | None:
    """Make the run's folder; one that was used before is moved aside, not overwritten.

    Args:
        output_dir: of the run.
        cfg: written into it, resolved, as config.yaml.

    Returns:
        Where an earlier run's folder was moved to (`<name>-1`, `-2`, ...), or None.
    """
    folder = Path(output_dir)
    moved_to = None
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (moved_to := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(moved_to)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    return moved_to


def reopen_output_folder(folder: Path, cfg: DictConfig, attempt: int) -> None:
    """Make a run's folder ready for another attempt: whatever is written is appended to.

    Args:
        folder: of the run.
        cfg: becomes config.yaml; that of the attempt before stays as config_attempt_<n>.yaml.
        attempt: which life of the run begins.
    """
    (folder / "logs").mkdir(exist_ok=True)
    if (folder / "config.yaml").exists():
        (folder / "config.yaml").rename(folder / f"config_attempt_{attempt - 1}.yaml")
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    for path in [*folder.glob("*.jsonl"), *folder.glob("logs/*.jsonl")]:
        cut_torn_line(path)


def append_line(file: TextIO, line: str) -> None:
    """Write one line of a run's file, out to the operating system.

    Args:
        file: opened for appending.
        line: without its end.

    Raises:
        OSError: naming the file, if it cannot be written; no part of the line is written later.
    """
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # or what is left of the line is tried at every close
            file.close()
        raise OSError(error.errno, f"cannot be written: {error.strerror}", file.name) from error

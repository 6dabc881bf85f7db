"""The folder of a run: made fresh, with the resolved config in it, and never overwritten."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf


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


def cut_torn_line(path: Path) -> None:
    """Remove what a killed attempt wrote of a record that it did not end."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

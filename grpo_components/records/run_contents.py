"""Tells whether a folder is empty, contains a run, or contains files that no run wrote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_components.records.folder_lock import LOCK, is_lock, read_holder

PLACEHOLDERS = (
    *(".gitkeep", ".keep", ".gitignore", ".DS_Store", "Thumbs.db", "desktop.ini"),
    "lost+found",
)
"""Files and folders to ignore: they contain nobody's work, and no run reads them."""
_REMOVED_ON_NFS = re.compile(r"\.nfs[0-9a-f]+")
_FILES = re.compile(
    r"config\.yaml|config_attempt_\d+\.yaml|receipts\.(jsonl|end)|trajectories\.jsonl"
    r"|report\.html|\.(report\.html|config\.yaml)\..+"
    rf"|{re.escape(LOCK)}|\.{re.escape(LOCK)}\.\w+"
    r"|logs/[^/]+\.(jsonl|log)"
    r"|checkpoints/(latest|best)|checkpoints/\.(latest|best)\.unfinished"
)
_FOLDERS = ("logs", "checkpoints", "skipped", "code")
"""Folders of a run whose files are checked one by one."""
_TREES = re.compile(
    r"checkpoints/step_\d+|checkpoints/\.step_\d+\.(unfinished|discarded)"
    r"|skipped/step_\d+|code/attempt_\d+|profile"
)
"""Folders of a run that may contain files with any name."""
_TOP = re.compile(
    r"log_.+\.txt|events\.out\.tfevents\..+|run_\d+_.+|wandb|torchtune_config\.yaml|iteration_\d+"
)
"""What torchtune's loggers and profiler write if they are given the run's folder itself."""
_KEYS = {"output_dir", "base_model_path", "max_staleness", "groups_per_step", "group_size"}
"""Keys in the config of every run."""
_MAX_CONFIG_BYTES = 2**20
_MAX_LINE_CHARS = 2**16


def is_empty(folder: Path) -> bool:
    """Whether a folder contains only empty folders, `PLACEHOLDERS` and a run's lock file."""
    for path in _walk(folder):
        own = path == folder / LOCK and not _is_foreign_lock(path)
        own |= path.parent == folder and path.name.startswith(f".{LOCK}.")
        if not own:
            return False
    return True


def is_run(folder: Path) -> bool:
    """Whether a folder contains a run's config and logs, or a lock file that names its holder.

    The config must have a run's keys, and receipts or event log must begin with a start record:
    other programs also write a `config.yaml` and a folder `logs`.
    """
    if read_holder(folder) is not None:
        return True
    if not (os.path.isdir(folder / "logs") and _config(folder / "config.yaml").keys() >= _KEYS):
        return False
    receipt, event = map(_first_record, (folder / "receipts.jsonl", folder / "logs/events.jsonl"))
    return receipt.get("record") == "start" or event.get("event") == "start"


def lies_in_run(folder: Path) -> Path | None:
    """Return the run that a folder is part of, e.g. as its `checkpoints`; None if there is none."""
    for parent in folder.parents:
        top = folder.relative_to(parent).parts[0]
        if is_run(parent) and (top in (*_FOLDERS, "profile") or top in _outputs(parent)):
            return parent
    return None


def foreign_entry(run: Path) -> Path | None:
    """Find the first file or folder in a run's folder that no run wrote."""
    outputs = _outputs(run)
    return _foreign(run, "", outputs)


def _foreign(run: Path, where: str, outputs: set[str]) -> Path | None:
    for entry in _entries(run / where):
        name = f"{where}/{entry.name}".lstrip("/")
        leads_to_output = any(output.startswith(f"{name}/") for output in outputs)
        if not entry.is_dir(follow_symlinks=False):
            own = _FILES.fullmatch(name) or name in outputs
            own = own or (entry.is_symlink() and (name in _FOLDERS or _TREES.fullmatch(name)))
            own = own or ("." in outputs and _TOP.fullmatch(name))
            if not own or (name == LOCK and _is_foreign_lock(run / LOCK)):
                return Path(name)
        elif _TREES.fullmatch(name) or name in outputs:
            if nested := next((p for p in _walk(run / name) if p.name == LOCK), None):
                return nested.relative_to(run)  # the lock of another run, which may still run
        elif name in _FOLDERS or leads_to_output:
            if found := _foreign(run, name, outputs):
                return found
        elif "." in outputs and _TOP.fullmatch(name):
            continue
        elif found := next(_walk(run / name), None):
            return found.relative_to(run)
    return None


def _is_foreign_lock(path: Path) -> bool:
    return not is_lock(path) and os.path.lexists(path)  # a lock that was just released is gone


def _outputs(run: Path) -> set[str]:
    """Return the paths in a run's folder that its configs give to metric logger and profiler.

    They are relative to the folder; "." is the folder itself.
    """
    found: set[str] = set()
    for path in (run / "config.yaml", *run.glob("config_attempt_*.yaml")):
        config = _config(path)
        output_dir = config.get("output_dir")
        if not isinstance(output_dir, str):
            continue
        for section in ("metric_logger", "profiler"):
            node = config.get(section)
            values = node.values() if isinstance(node, dict) else ()
            for value in values:
                if isinstance(value, str) and value.startswith(output_dir):
                    found.add(os.path.relpath(value, output_dir))
    return {name for name in found if not name.startswith("..")}


def _config(path: Path) -> dict[str, Any]:
    """Return the config in a file; empty if the file is not a config."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return {}
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_record(path: Path) -> dict[str, Any]:
    """Return the first record in a file of JSON lines; empty if there is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            record = json.loads(lines.readline(_MAX_LINE_CHARS))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [e for e in entries if not _is_placeholder(e.name)]
    except FileNotFoundError:  # another process just renamed it
        return []
    return sorted(found, key=lambda entry: entry.name)


def _is_placeholder(name: str) -> bool:
    return name in PLACEHOLDERS or _REMOVED_ON_NFS.fullmatch(name) is not None


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every file and symbolic link below a folder, except placeholders."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name)
        else:
            yield folder / entry.name

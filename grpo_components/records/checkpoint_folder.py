"""Publishes each checkpoint of a run atomically, and keeps the links `latest` and `best`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from grpo_components.files import write_whole
from grpo_components.settings import Settings

LATEST = "latest"
BEST = "best"
_EVALUATION = "evaluation.json"
"""Name of the file in a checkpoint with the metrics of its evaluation."""
_KIND = "kind"
"""Key in `evaluation.json`: a hash of the settings that an evaluation depends on."""
_ADDRESS = ("base_url", "api_key_env")
"""Config keys of a judge that do not affect its grades."""
_NAME = re.compile(r"step_(\d+)")


def nbytes(cfg: Settings, parameters: int, trained: int) -> int:
    """Return the minimum bytes of a checkpoint: weights, float32 master weights, Adam's moments."""
    is_adam = cfg.optimizer["_component_"].startswith("torch.optim.Adam")
    moments = 8 if is_adam else 0  # unknown for others
    return parameters * {"fp32": 4, "bf16": 2}[cfg.dtype] + trained * (4 + moments)


def most_at_once(cfg: Settings) -> int:
    """Return the maximum number of checkpoints on disk; a save ends before old ones are deleted."""
    saved = -(-cfg.num_steps // cfg.save_every_n_steps)
    if cfg.keep_last_n is None:
        return saved
    return min(saved, cfg.keep_last_n + 1 + (cfg.keep_best is not None))


def begin(checkpoints: Path, step: int, incarnation: str) -> Path:
    """Remove leftovers of a killed run, and make a hidden folder to write a checkpoint into.

    The folder's name contains the id of this driver process (`incarnation`), because processes that
    a killed driver started may still write to that driver's folder.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    clean(checkpoints)
    unfinished = checkpoints / f".step_{step}.{incarnation}.unfinished"
    unfinished.mkdir()
    return unfinished


def clean(checkpoints: Path) -> None:
    """Remove half-written and half-deleted checkpoints."""
    for kind in ("unfinished", "discarded"):
        for leftover in checkpoints.glob(f".*.{kind}"):
            discard(leftover)


def saved_steps(checkpoints: Path) -> dict[Path, int]:
    """Map the checkpoints in a folder to their training steps; ignore other files and folders."""
    named = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("step_*"))
    return {path: int(name[1]) for path, name in named if name and path.is_dir()}


def publish(unfinished: Path, step: int, keep_last_n: int | None) -> Path:
    """Rename a written checkpoint to `step_<step>`, point `latest` at it, and delete older ones.

    The files are synced to disk first, and every change is one rename: after a crash, `latest`
    points at a whole checkpoint, the new or the previous one.
    """
    checkpoints = unfinished.parent
    target = checkpoints / f"step_{step}"
    assert latest(checkpoints) != target, "a step is saved once in an attempt"
    # safetensors makes files that only their owner can read: give all files the usual mode.
    mode = stat.S_IMODE((unfinished / "state" / "config.yaml").stat().st_mode)
    for path in (*unfinished.rglob("*"), unfinished):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        _sync(path)
    discard(target)  # left by an earlier attempt
    unfinished.rename(target)
    _sync(checkpoints)
    point_latest(target)
    if keep_last_n is not None:
        # Delete later steps first: they belong to an attempt that was rolled back.
        kept = (target, _target(checkpoints, BEST))
        found = saved_steps(checkpoints)
        others = [folder for folder in found if folder not in kept]
        others.sort(key=lambda folder: (found[folder] < step, found[folder]), reverse=True)
        for folder in others[keep_last_n - 1 :]:
            discard(folder)
    return target


def latest(checkpoints: Path) -> Path | None:
    """Return the checkpoint that `latest` points at; None if there is no such link."""
    return _target(checkpoints, LATEST)


def earlier(checkpoint: Path) -> list[Path]:
    """Return the checkpoints of earlier steps in the same folder, the newest first."""
    steps = saved_steps(checkpoint.parent)
    before = [path for path, step in steps.items() if step < steps.get(checkpoint, 0)]
    return sorted(before, key=lambda path: steps[path], reverse=True)


def point_latest(checkpoint: Path) -> None:
    """Point `latest` at a checkpoint, so that the run resumes from it."""
    _point(checkpoint, LATEST)


def rate(checkpoint: Path, metrics: Mapping[str, float], cfg: Settings) -> None:
    """Write a checkpoint's `evaluation.json` for `choose_best`: metrics, and a hash of settings."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    rating = json.dumps({**finite, _KIND: _kind_of_evaluation(cfg)}, indent=1)
    write_whole(checkpoint / _EVALUATION, rating, durable=True)
    _sync(checkpoint)


def choose_best(checkpoints: Path, last_step: int, cfg: Settings) -> Path | None:
    """Point `best` at the checkpoint with the highest metric `keep_best`; of equals, the earliest.

    Only steps up to `last_step` count, and only evaluations of the same prompts, sampling and
    rewards as in `cfg`.
    """
    metric, kind = cfg.keep_best, _kind_of_evaluation(cfg)
    ratings, steps = {}, saved_steps(checkpoints)
    for folder, step in steps.items():
        path = folder / _EVALUATION
        if step <= last_step and path.is_file():
            rating = json.loads(path.read_text(encoding="utf-8"))
            if metric in rating and rating.get(_KIND, kind) == kind:  # old files have no kind
                ratings[folder] = rating[metric]
    if not ratings:
        best = _target(checkpoints, BEST)
        if best is None or steps.get(best, math.inf) > last_step:
            (checkpoints / BEST).unlink(missing_ok=True)
        return None  # a best of another kind stays until a checkpoint of this kind is rated
    best = max(ratings, key=lambda folder: (ratings[folder], -steps[folder]))
    if best != _target(checkpoints, BEST):
        _point(best, BEST)
    return best


def _kind_of_evaluation(cfg: Settings) -> str:
    """Return a hash of an evaluation's settings; with equal hashes, metrics can be compared."""
    given, generator, temperature = cfg.eval, cfg.generator, cfg.eval.temperature
    if temperature is None:
        temperature = generator.temperature
    sampling = temperature, given.samples_per_prompt, generator.max_response_tokens
    rewards = [
        {key: value for key, value in reward.items() if key not in _ADDRESS}
        for reward in cfg.rewards.values()
    ]
    parts = cfg.eval_dataset, cfg.environment, rewards
    kind = (*map(str, parts), sampling, generator.truncation)
    return hashlib.sha256(json.dumps(kind, sort_keys=True, default=str).encode()).hexdigest()


def discard(path: Path) -> None:
    """Delete a folder, a file or a link, if it exists.

    A folder is first renamed to a hidden name, so that a visible folder is always whole.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        hidden = path
        if not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.discarded")
            path.rename(hidden)
        shutil.rmtree(hidden)


def _target(checkpoints: Path, name: str) -> Path | None:
    link = checkpoints / name
    return checkpoints / os.readlink(link) if link.is_symlink() else None


def _point(checkpoint: Path, name: str) -> None:
    link = checkpoint.parent / f".{name}.unfinished"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.replace(checkpoint.parent / name)
    _sync(checkpoint.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

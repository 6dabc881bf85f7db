"""Checks `output_dir` against all other paths in a config, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_components.config.checkpointer_checks import check_writable
from grpo_components.errors import fail
from grpo_components.records.resume import find_checkpoint, run_of
from grpo_components.records.run_folder import is_used, real_path, refuse_folder_in_use, short
from grpo_components.replay.recorded_run import run_folder
from grpo_components.settings import Settings

_INPUTS = {
    *("base_model_path", "checkpointer.checkpoint_dir", "reward_model.path", "eval_only"),
    *("train_from", "replay_events", "dataset.source", "eval_dataset.source", "model.path"),
    *("tokenizer.path", "tokenizer.merges_file", "tokenizer.special_tokens_path", "teacher.path"),
}
"""Keys of files and folders that a run reads.

Text under other keys counts as a path if it has a slash or is the path of a file."""
_OUTPUTS = ("output_dir", "checkpointer.output_dir", "metric_logger.", "profiler.")
"""Prefixes of the keys that name what the run writes."""


def check_inputs(settings: Settings) -> None:
    """Refuse outputs that cannot be written, and an output_dir that contains or lies in an input.

    Inputs must stay where they are: a used output_dir is moved aside with everything in it. Links
    are followed.
    """
    output_dir = real_path(settings.output_dir)
    alone = "a folder for this run alone"
    for key, named in _paths("", settings.model_dump()):
        path = real_path(named)
        if path.is_relative_to(output_dir):
            problem = f"{short(Path(named))} lies in {short(output_dir)}, and {key} names it"
            fail("output_dir", problem, alone)
        if key in _INPUTS and output_dir.is_relative_to(path):
            problem = f"{short(output_dir)} lies in {key}, {short(Path(named))}"
            fail("output_dir", problem, "a folder outside of it")
    if Path.cwd().is_relative_to(output_dir):
        fail("output_dir", f"{short(Path.cwd())} lies in {short(output_dir)}", alone)
    if not (output_dir.is_dir() and os.access(output_dir, os.W_OK | os.X_OK)):
        check_writable("output_dir", output_dir)  # `lock_folder` writes to one that exists
    outputs = {"metric_logger.log_dir": settings.metric_logger.get("log_dir")}
    if settings.profiler.enabled:
        outputs["profiler.output_dir"] = settings.profiler.get("output_dir")
    for key, place in outputs.items():
        if isinstance(place, str) and not real_path(place).is_relative_to(output_dir):
            check_writable(key, real_path(place))


def check_folder(settings: Settings) -> None:
    """Refuse an output_dir that another process uses, or that contains files which no run wrote.

    `begin_run` checks it again, with the folder locked.
    """
    output_dir = real_path(settings.output_dir)
    refuse_folder_in_use(output_dir)  # before its contents are read
    checkpoint = find_checkpoint(settings.resume_from_checkpoint, output_dir)
    if checkpoint is not None and run_of(checkpoint) == output_dir:
        return  # a resume in the run's own folder
    if checkpoint is not None and output_dir.is_relative_to(checkpoint):
        problem = f"{short(output_dir)} lies in the checkpoint of resume_from_checkpoint"
        fail("output_dir", problem, "a folder outside of it")
    if is_used(output_dir) and checkpoint is not None and checkpoint.is_relative_to(output_dir):
        problem = f"{short(output_dir)} holds the checkpoint of resume_from_checkpoint, but not in "
        fail("output_dir", problem + "a run's folder checkpoints", "another folder")


def _paths(key: str, given: Any) -> Iterator[tuple[str, str]]:
    """Yield the existing files and folders that a config names as inputs, each with its key."""
    if key.startswith(_OUTPUTS) or key in ("resume_from_checkpoint", "log_level"):
        return
    if isinstance(given, str):
        if (key in _INPUTS or os.sep in given or _is_file(given)) and _exists(given):
            yield key, str(run_folder(given)) if key == "replay_events" else given
        return
    items = given.items() if isinstance(given, dict) else ()
    items = enumerate(given) if isinstance(given, list | tuple) else items
    for name, value in items:
        yield from _paths(f"{key}.{name}" if key else str(name), value)


def _exists(path: str) -> bool:
    return "\0" not in path and os.path.lexists(path)


def _is_file(path: str) -> bool:
    return "\0" not in path and os.path.isfile(path)

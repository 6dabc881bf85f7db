"""Starts a run from scratch or from a checkpoint; each start or rollback begins a new attempt."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from omegaconf import OmegaConf
from safetensors import safe_open

from grpo_components.errors import fail, shown
from grpo_components.files import records_of
from grpo_components.records.checkpoint_folder import earlier, latest, point_latest
from grpo_components.records.receipt_chain import END_FILE
from grpo_components.records.run_folder import (
    CODE,
    RunIdentity,
    lock_folder,
    new_identity,
    prepare_output_folder,
    real_path,
    reopen_output_folder,
)
from grpo_components.settings import Settings, needs_reference
from grpo_components.state_files import FORMAT, read_state

FIXED = (
    *("seed", "dtype", "base_model_path", "model", "tokenizer", "checkpointer.model_type"),
    *("lora.rank", "lora.alpha", "lora.target_modules", "dataset", "shuffle", "curriculum"),
    *("group_size", "optimizer._component_", "lr_scheduler._component_"),
)
"""Config keys that a resume must not change, because the saved state depends on them. All others
may change: steps, roles, batch size, learning rate, asynchrony, loss, rewards, ..."""


class Stateful(Protocol):
    """An object of the driver whose state goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in values that JSON can represent."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a state that `state_dict` returned."""


@dataclass(frozen=True)
class RunStart:
    """Where an attempt of a run starts, and the locked folder that it writes to."""

    attempt: int
    checkpoint: Path | None
    """Checkpoint that the attempt starts from; None if it starts from scratch."""
    note: str
    """Line to show to the user; may be empty."""
    output_dir: Path
    driver: dict[str, Any]
    """State of the driver at the start, including `ledger` and `prompts`."""
    identity: RunIdentity
    lock: TextIO
    """Open file that keeps `output_dir` locked; close it after the last write to the folder."""


def find_checkpoint(resume_from: bool | str, output_dir: Path) -> Path | None:
    """Return the undamaged checkpoint to resume from; None if `resume_from` is false."""
    if resume_from is False:
        return None
    checkpoints = output_dir / "checkpoints"
    path = checkpoints / "latest" if resume_from is True else Path(resume_from)
    if not (path / "state").is_dir():
        problem = f"{shown(resume_from)} given, but {path} is not a checkpoint of a run"
        fail("resume_from_checkpoint", problem, "false, or the path of a step_<n> folder")
    path = path.resolve()
    problem = damage(path)
    if problem is None:
        return path
    whole = next((other for other in earlier(path) if damage(other) is None), None)
    if whole is not None and resume_from is True:
        return whole
    offered = f"{whole}, the newest whole checkpoint before it" if whole else "another checkpoint"
    fail("resume_from_checkpoint", f"{path} is damaged: {problem}", offered)


def damage(checkpoint: Path) -> str | None:
    """Return what is damaged in a checkpoint; None if a run can resume from it.

    Of weights and optimizer state, only the sizes are checked; the trainers check the values.
    """
    for name, read in _readers(checkpoint):
        try:
            read()
        except FileNotFoundError as error:
            return f"{Path(error.filename).relative_to(checkpoint)} is missing"
        except Exception as error:  # damaged bytes may raise any error
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
        # `safe_open` compares the file's size with its header.
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


def check_resume(values: dict[str, Any], kl_sections: Mapping[str, Mapping[Any, Any]]) -> None:
    """Refuse a config that resumes from a checkpoint but cannot continue the checkpoint's run."""
    checkpoint = find_checkpoint(values["resume_from_checkpoint"], Path(values["output_dir"]))
    if checkpoint is None:
        return
    saved: Any = OmegaConf.to_container(OmegaConf.load(checkpoint / "state" / "config.yaml"))
    component = str(_at(values, "lr_scheduler._component_"))
    # A scheduler of torch saves its arguments with its state, and computes each rate from the last.
    for key in (*FIXED, *(["lr_scheduler"] if component.startswith("torch.") else ())):
        for inner, before, now in differences(_at(saved, key), _at(values, key), key):
            problem = f"{shown(now)} given, but the checkpoint was written with another value"
            fail(inner, problem, shown(before))
    before, now = {key: saved.get(key, {}) for key in kl_sections}, kl_sections
    if any(map(needs_reference, before.values())) != any(map(needs_reference, now.values())):
        key = next(k for k in now if needs_reference(before[k]) != needs_reference(now[k]))
        problem = "cannot change to or from 0: the checkpoint has buffered groups made for the old"
        fail(f"{key}.kl_coeff", problem, shown(before[key].get("kl_coeff", 0)))
    had, has = (config.get("teacher") is not None for config in (saved, values))
    if had != has:
        problem = "cannot change to or from null: the checkpoint has groups made for the old"
        fail("teacher", problem, "the checkpoint's" if had else "null")
    done = read_state(checkpoint / "state", "driver")["ledger"]["steps_done"]
    if values["num_steps"] <= done:
        problem = f"{values['num_steps']} given, but the checkpoint has {done} steps done"
        fail("num_steps", problem, f"above {done}")


def begin_run(cfg: Settings, ledger: Stateful, prompts: Stateful) -> RunStart:
    """Start or resume a run: make or reopen its folder; if resumed, restore ledger and prompts."""
    folder, state, notes = real_path(cfg.output_dir), None, list[str]()
    checkpoint = find_checkpoint(cfg.resume_from_checkpoint, folder)
    if checkpoint is not None:
        state = read_state(checkpoint / "state", "driver")
        _restore(state, ledger, prompts)
    identity = new_identity((state or {}).get("identity", {}).get("run"))
    if checkpoint is not None and run_of(checkpoint) == folder:
        lock, attempt = lock_folder(folder), last_attempt(folder) + 1
        newest = latest(checkpoint.parent)
        point_latest(checkpoint)  # later checkpoints belong to the old attempt
        reopen_output_folder(folder, cfg, attempt, identity)
        if newest is not None and (problem := damage(newest)):
            notes.append(f"{newest.name} is damaged: {problem}")
    else:
        lock, moved_to = prepare_output_folder(folder, cfg, identity)
        if checkpoint is not None:
            _copy_history(run_of(checkpoint), folder)
        if moved_to:
            notes.append(f"{cfg.output_dir} held another run, which is now {moved_to}")
        attempt = last_attempt(folder) + 1
    if checkpoint is not None:
        notes.append(f"resumed from {checkpoint} (attempt {attempt})")
    driver = state or {"ledger": ledger.state_dict(), "prompts": prompts.state_dict()}
    return RunStart(attempt, checkpoint, "; ".join(notes), folder, driver, identity, lock)


def _restore(driver: dict[str, Any], ledger: Stateful, prompts: Stateful) -> None:
    ledger.load_state_dict(copy.deepcopy(driver["ledger"]))
    prompts.load_state_dict(copy.deepcopy(driver["prompts"]))


def roll_back(run_start: RunStart, ledger: Stateful, prompts: Stateful) -> RunStart:
    """Begin a new attempt: set ledger and prompts back to the last checkpoint, or to the start."""
    newest = run_start.output_dir / "checkpoints" / "latest"
    if newest.exists():
        state = read_state(newest / "state", "driver")
        run_start = replace(run_start, checkpoint=newest.resolve(), driver=state)
    _restore(run_start.driver, ledger, prompts)
    return replace(run_start, attempt=run_start.attempt + 1)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint `checkpoints/step_<n>`."""
    return checkpoint.parent.parent


def last_attempt(output_dir: Path) -> int:
    """Return the number of the last attempt in a run's receipts; -1 if there is none."""
    starts = records_of(output_dir / "receipts.jsonl", b'{"event": "start"')
    return [-1, *(start["attempt"] for start in starts)][-1]


def _copy_history(run: Path, folder: Path) -> None:
    """Copy the receipts, configs and code snapshots of a run to the folder that continues it."""
    if not (run / "receipts.jsonl").is_file():  # the checkpoint was copied elsewhere alone
        return
    if (run / CODE).is_dir():
        code = run / CODE, folder / CODE
        shutil.copytree(*code, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    # The end file first: the copied one may be older than the receipts, never newer.
    for path in (run / END_FILE, run / "receipts.jsonl", *run.glob("config_attempt_*.yaml")):
        if path.is_file():
            shutil.copy2(path, folder)
    last = last_attempt(folder)
    if last >= 0 and (run / "config.yaml").is_file():
        shutil.copy2(run / "config.yaml", folder / f"config_attempt_{last}.yaml")


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def differences(before: Any, given: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, saved value, given value) wherever two configs differ."""
    if isinstance(before, dict) and isinstance(given, dict):
        for name in before | given:
            inner = f"{key}.{name}" if key else name
            yield from differences(before.get(name), given.get(name), inner)
    elif before != given:
        yield key, before, given

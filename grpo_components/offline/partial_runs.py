"""Sets up partial runs: only evaluation, only generators, or only trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from grpo_components.errors import fail, shown
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import Settings
from grpo_components.state_files import read_state
from grpo_components.trajectory import Trajectory

TRAJECTORIES = "trajectories.jsonl"
"""Name of the file that a `rollout_only` run writes to its folder, and `train_from` reads."""
_WRITER = "grpo_components.offline.trajectory_file.TrajectoryWriter"
_RECORDED = "grpo_components.offline.trajectory_file.RecordedGroups"


class RecordedPrompts(Dataset[dict[str, Any]]):
    """The prompts of a trajectory file as a data set, one row per group."""

    def __init__(self, path: str) -> None:
        from grpo_components.offline.trajectory_file import read_groups

        self._path = path
        self._prompts: list[list[int]] = []
        self._lengths: list[int] = []
        """Tokens of each group's prompt plus its longest response."""
        for group in read_groups(path):
            self._prompts.append(group[0].prompt_ids.tolist())
            longest = max(len(trajectory.response_ids) for trajectory in group)
            self._lengths.append(len(group[0].prompt_ids) + longest)
        self.max_prompt_length = max(map(len, self._prompts))
        """Length of the longest prompt, in tokens."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        # The file has no prompt texts, but reports of failed samples show one.
        text = f"(line {row + 1} of {self._path})"
        return {"prompt_index": row, "prompt_ids": self._prompts[row], "prompt_text": text}

    def check(self, longest: int, limit: str) -> None:
        """Refuse a prompt and response of over `longest` tokens; `limit` is the limit's name."""
        for line, length in enumerate(self._lengths, start=1):
            if length > longest:
                problem = f"{self._path}, line {line}, has a prompt and response of {length} tokens"
                fail("train_from", problem, f"at most {longest}, {limit}")


def roles_of(cfg: Settings, trainer: str, generator: str) -> tuple[str, str]:
    """Return the dotted paths of trainer and generator, or of their stand-ins in partial runs."""
    return trainer if cfg.trains else _WRITER, _RECORDED if cfg.train_from else generator


def start_model(cfg: Settings) -> dict[str, Any]:
    """Return options for an engine's first weights: the base model, another model or an adapter."""
    from grpo_components.models.lora import read_adapter_options

    if not isinstance(cfg.eval_only, str):
        return {"model_path": cfg.base_model_path}
    adapter = _adapter_folder(Path(cfg.eval_only))
    if adapter is None:
        return {"model_path": cfg.eval_only, "lora": None}
    options = {"lora": read_adapter_options(adapter), "adapter_path": str(adapter)}
    return {"model_path": cfg.base_model_path, **options}


def _adapter_folder(folder: Path) -> Path | None:
    """Return where a folder has a LoRA adapter; None if it has none, or has a whole model."""
    from grpo_components.models.lora import ADAPTER_FOLDER

    if (folder / "config.json").is_file():
        return None
    places = (folder / ADAPTER_FOLDER, folder)
    return next((place for place in places if (place / "adapter_config.json").is_file()), None)


def evaluated_version(cfg: Settings) -> int:
    """Return the policy version of the weights that generators start with."""
    if not cfg.eval_only:
        return 0  # training starts at version 0, even from weights of another run
    state = Path(cfg.base_model_path if cfg.eval_only is True else cfg.eval_only) / "state"
    if not (state / "driver.json").is_file():
        return 0
    return read_state(state, "driver")["ledger"]["policy_version"]


def check_partial_run(cfg: Settings) -> None:
    """Refuse `eval_only`, `rollout_only` or `train_from` if it cannot work."""
    given = [key for key in ("eval_only", "rollout_only", "train_from") if getattr(cfg, key)]
    if not given:
        return
    key, *others = given
    if others:
        fail(others[0], f"{shown(getattr(cfg, others[0]))} given with {key}", "one of the two")
    if cfg.replay_events:
        fail(key, "given with replay_events, which repeats a whole run", "false or null")
    if key != "train_from" and cfg.resume_from_checkpoint is not False:
        fail("resume_from_checkpoint", f"given with {key}, which trains nothing", "false")
    if isinstance(cfg.eval_only, str):
        _check_checkpoint(Path(cfg.eval_only))
    if cfg.train_from:
        _check_recorded(cfg, cfg.train_from)


def _check_checkpoint(folder: Path) -> None:
    has_weights = any(next(folder.glob(kind), None) for kind in ("*.safetensors", "*.bin", "*.pt"))
    has_model = has_weights and (folder / "config.json").is_file()
    if not has_model and _adapter_folder(folder) is None:
        problem = f"{folder} has neither a Hugging Face model with weights nor an adapter"
        fail("eval_only", problem, "true for base_model_path, or the path of another model")


def _check_recorded(cfg: Settings, path: str) -> None:
    if cfg.keep_best is not None:
        fail("keep_best", "given with train_from, which evaluates nothing", "null")
    if cfg.reward_model.path is not None:
        fail("reward_model.path", "given with train_from, whose rewards are recorded", "null")
    allowed = f"{TRAJECTORIES} of a run with rollout_only: true"
    if not Path(path).is_file():
        fail("train_from", f"no file {path}", allowed)
    from grpo_components.offline.trajectory_file import read_groups  # imports torchtune

    try:
        groups = list(read_groups(path))
    except ValueError as error:
        fail("train_from", str(error), allowed)
    if not groups:
        fail("train_from", f"{path} is empty", allowed)
    if len(groups) < cfg.groups_per_step:
        problem = f"{path} has {len(groups)} groups, fewer than a step trains"
        given = f"{cfg.groups_per_step} given, and {problem}"
        fail("groups_per_step", given, f"at most {len(groups)}")
    if other := {len(group) for group in groups} - {cfg.group_size}:
        problem = f"{cfg.group_size} given, and {path} has groups of {min(other)}"
        fail("group_size", problem, str(min(other)))
    contract = StalenessContract.of(cfg)
    oldest, last_step = min(map(_oldest_version, groups)), cfg.num_steps - 1
    if not contract.may_train(oldest, last_step):
        needed = contract.staleness(oldest, last_step)
        problem = f"{cfg.max_staleness} given, and {path} has tokens of policy version "
        problem += f"{oldest}, which the last step would find {needed} versions old"
        fail("max_staleness", problem, f"at least {needed} (or fewer num_steps)")


def _oldest_version(group: list[Trajectory]) -> int:
    return min((v for v in (t.oldest_version for t in group) if v is not None), default=0)

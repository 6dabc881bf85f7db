"""Opens the log of a run, as its config says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo_components.config.building import build, shared_prompts
from grpo_components.config.component_trial import check_logger
from grpo_components.quiet import without_prints
from grpo_components.records.run_log import RunLog


def build_run_log(cfg: DictConfig, attempt: int, note: str, dataset: Any, held_out: Any) -> RunLog:
    """The run log that a config asks for.

    Args:
        cfg: checked by preflight.
        attempt: which life of the run.
        note: what the person who watches should know first; may be empty.
        dataset: to train on; its own `note`, where it has one, is told, too.
        held_out: to be evaluated on; its note as well, and whether the run trains on it.
    """
    with without_prints(cfg.log_level):
        logger = build("metric_logger", cfg.metric_logger)
    check_logger(cfg.metric_logger._component_, logger)
    every, folder = cfg.log_every_n_steps, Path(cfg.output_dir)
    run_log = RunLog(folder, logger, every, cfg.num_steps, attempt)
    left_out = re.sub("^dataset", "eval_dataset", getattr(held_out, "note", ""), flags=re.MULTILINE)
    trains = not (cfg.eval_only or cfg.rollout_only)
    shared = shared_prompts(dataset, held_out) if trains else ""
    for told in filter(None, (note, getattr(dataset, "note", ""), left_out, shared)):
        run_log.note(told)
    return run_log

"""Writes metrics and sampled groups as JSON lines, and metrics to a torchtune logger."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.training.metric_logging import MetricLoggerInterface, WandBLogger

from grpo_components.files import ANSWERS, append_line
from grpo_components.records.rollout_table import log_rollout_table


class MetricLog:
    """Writes metrics to `{output_dir}/logs/metrics.jsonl` and, every n steps, to a logger.

    The file gets every step. Each line is flushed, so that the file is complete after a crash.
    Sampled groups go to `rollouts.jsonl` in the same folder, an evaluation's answers to
    `evaluation_answers.jsonl`.
    """

    def __init__(
        self, output_dir: str, metric_logger: MetricLoggerInterface, log_every_n_steps: int
    ) -> None:
        folder = Path(output_dir) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._rollouts = (folder / "rollouts.jsonl").open("a", encoding="utf-8")
        self._answers = (folder / ANSWERS).open("a", encoding="utf-8")
        self._metric_logger = metric_logger
        self._log_every_n_steps = log_every_n_steps

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of one step; a NaN or infinite value becomes null in the file."""
        values = {key: _plain(value) for key, value in metrics.items()}
        append_line(self._metrics, _line({"step": step, **values}))
        evaluated = any(key.startswith("eval/") for key in values)
        if step % self._log_every_n_steps == 0 or evaluated:
            # TensorBoard and W&B show NaN as a gap, but refuse null.
            payload = {key: math.nan if value is None else value for key, value in values.items()}
            try:
                self._metric_logger.log_dict(payload, step)
            except OSError as error:  # the error does not name the logger
                raise OSError(f"metric_logger cannot log step {step}: {error}") from error

    def log_rollouts(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled groups to `logs/rollouts.jsonl`, one line each, and to W&B as a table."""
        plain_groups = [_plain(group) for group in groups]
        for group in plain_groups:
            append_line(self._rollouts, _line({"step": step, **group}))
        is_due = bool(groups) and step % self._log_every_n_steps == 0
        if is_due and isinstance(self._metric_logger, WandBLogger):
            try:
                log_rollout_table(step, plain_groups)
            except OSError as error:
                raise OSError(f"metric_logger cannot log step {step}: {error}") from error

    def log_answers(self, step: int, prompts: Sequence[Mapping[str, Any]]) -> None:
        """Write an evaluation's answers to `logs/evaluation_answers.jsonl`."""
        for prompt in prompts:
            append_line(self._answers, _line({"step": step, **_plain(prompt)}))

    def close(self) -> None:
        """Close the files, then the logger, which may have to wait for a server."""
        self._metrics.close()
        self._rollouts.close()
        self._answers.close()
        self._metric_logger.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors to numbers or lists, NaN to None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        value = value.tolist()
        if isinstance(value, list):
            return value[0] if len(value) == 1 else _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

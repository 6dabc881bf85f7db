"""Writes metrics and sampled groups as JSON lines, and metrics to a torchtune logger."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.training.metric_logging import MetricLoggerInterface, WandBLogger

from grpo_components.files import ANSWERS, EVALUATIONS, append_line
from grpo_components.plain_text import plain


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
        names = ("metrics.jsonl", "rollouts.jsonl", ANSWERS, EVALUATIONS)
        self._files = [(folder / name).open("a", encoding="utf-8") for name in names]
        self._metrics, self._rollouts, self._answers, self._evaluations = self._files
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
            with _named(step):
                self._metric_logger.log_dict(payload, step)

    def log_rollouts(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled groups to `logs/rollouts.jsonl`, one line each, and to W&B as a table."""
        plain_groups = [_plain(group) for group in groups]
        for group in plain_groups:
            append_line(self._rollouts, _line({"step": step, **group}))
        is_due = bool(groups) and step % self._log_every_n_steps == 0
        if is_due and isinstance(self._metric_logger, WandBLogger):
            with _named(step):
                _log_rollout_table(step, plain_groups)

    def log_answers(
        self, step: int, prompts: Sequence[Mapping[str, Any]], success: Mapping[str, Any]
    ) -> None:
        """Write an evaluation's success by prompt, and the answers to some of the prompts."""
        append_line(self._evaluations, _line({"step": step, **success}))
        for prompt in prompts:
            append_line(self._answers, _line({"step": step, **_plain(prompt)}))

    def close(self) -> None:
        """Close the files, then the logger, which may have to wait for a server."""
        for file in self._files:
            file.close()
        self._metric_logger.close()


@contextlib.contextmanager
def _named(step: int) -> Iterator[None]:
    """Context manager: add logger and step to an OSError, which names neither."""
    try:
        yield
    except OSError as error:
        raise OSError(f"metric_logger cannot log step {step}: {error}") from error


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


def _log_rollout_table(step: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Log groups as the table `rollouts` to the W&B run of this process."""
    import wandb  # only if W&B is the logger: the import takes most of a second

    columns, rows = rollout_rows(step, groups)
    # Answers in a data set and values of a user's reward may have mixed types.
    table = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
    wandb.log({"rollouts": table, "global_step": step})


def rollout_rows(step: int, groups: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return column names, and one row per response; columns without any value are left out."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        shared = {name: group[name] for name in group if name not in ("responses", "advantages")}
        for response, advantage in zip(group["responses"], group["advantages"], strict=True):
            row = {"step": step, **shared, **response}
            oldest, newest = row.pop("versions") or (None, None)
            terms = row.pop("reward_terms").items()
            row |= {"advantage": advantage, "oldest_version": oldest, "newest_version": newest}
            rows.append(row | {f"reward_terms/{name}": value for name, value in terms})
    columns = dict.fromkeys(name for row in rows for name in row if row[name] is not None)
    return [*columns], [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    # Lists as JSON text: W&B needs one type in a column, and some logprobs are null.
    value = json.dumps(value) if isinstance(value, list | dict) else value
    return plain(value) if isinstance(value, str) else value

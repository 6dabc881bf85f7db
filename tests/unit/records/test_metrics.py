"""Metrics of every step reach the file; torchtune's loggers get every n-th step."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lib.rows import read_rows
from omegaconf import OmegaConf
from torchtune import config

from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.records.metrics import rollout_rows
from grpo_components.records.run_log import LiveReport, RunLog

LOGGERS = "torchtune.training.metric_logging"


@pytest.fixture
def make(monkeypatch, new_log):
    """Logs that write no pages."""
    monkeypatch.setattr(RunLog, "_report", lambda log: None)
    monkeypatch.setattr(LiveReport, "start", lambda report: None)
    return new_log


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return read_rows(folder / f"logs/{name}.jsonl")


def test_tensors_are_numbers_and_nan_and_infinity_null_in_the_file_and_nan_for_the_logger(
    make, tmp_path
):
    log, logger = make()
    tensors = {"tensor": torch.tensor(0.5), "one": torch.tensor([2.0])}
    arrays = {"array": np.float32(0.25), "nan": torch.tensor(math.nan), "count": np.int64(3)}
    log.step(1, tensors | arrays | {"a": math.inf, "b": -math.inf}, 0)
    expected = {"tensor": 0.5, "one": 2.0, "array": 0.25, "nan": None, "count": 3}
    [line] = lines(tmp_path)
    assert line.items() >= {"step": 1, "attempt": 0, **expected, "a": None, "b": None}.items()
    [payload, _] = logger.log_dict.call_args.args
    assert all(math.isnan(payload[key]) for key in ("nan", "a", "b")) and payload["one"] == 2.0


def test_every_step_is_flushed_and_the_logger_gets_every_nth_and_every_evaluation(make, tmp_path):
    log, logger = make(log_every_n_steps=4)
    for step in range(1, 11):
        log.step(step, {"eval/success_rate": 0.5} if step in (5, 10) else {"lr": 0.5}, 0)
        assert len(lines(tmp_path)) == step, "flushed before close"
    assert [call.args[1] for call in logger.log_dict.call_args_list] == [4, 5, 8, 10]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 11))


def group() -> dict[str, Any]:
    """A group of two responses, the second of which failed."""
    known = {"response_tokens": 2, "finish_reason": "stop", "tokens": ["4", "\n"]}
    scored = {"reward": 1.1, "reward_terms": {"right": 1.0, "form": 0.1}, "success": True}
    failed = {"reward": None, "reward_terms": {}, "success": False, "error": "timed out"}
    logprobs = {"generator_logprobs": [-1.5, None], "reference_logprobs": None}
    return {
        **{"attempt": 0, "group_id": 3, "prompt_index": 9, "epoch": 1, "prompt": "2+2?"},
        **{"answer": "4", "advantages": [0.5, -0.5]},
        "responses": [
            {"response": "4\n", **known, **scored, **logprobs, "versions": [0, 1], "error": None},
            {"response": "", **known, **failed, **logprobs, "versions": None},
        ],
    }


def test_the_table_has_a_row_for_each_response_and_a_column_for_each_reward():
    columns, rows = rollout_rows(7, [group()])
    scored, failed = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (scored["step"], scored["group_id"], scored["prompt"]) == (7, 3, "2+2?")
    assert (scored["response"], scored["reward"], scored["advantage"]) == ("4\n", 1.1, 0.5)
    assert (scored["reward_terms/right"], scored["reward_terms/form"]) == (1.0, 0.1)
    assert (scored["oldest_version"], scored["newest_version"]) == (0, 1)
    assert json.loads(scored["generator_logprobs"]) == [-1.5, None]
    assert (failed["reward"], failed["reward_terms/right"]) == (None, None)
    assert failed["error"] == "timed out"
    assert "reference_logprobs" not in columns and "trainer_logprobs" not in columns


def run_with(make, node: dict[str, Any], *groups: dict[str, Any]) -> None:
    """Log a step with an evaluation and a NaN through a real torchtune logger."""
    log, _ = make(logger=config.instantiate(OmegaConf.create(node)))
    entries = [LedgerEntry(group["group_id"], {}, 0, 0, 0, 0) for group in groups]
    log.rollouts(1, entries, groups, np.array([[0.5, -0.5]] * len(groups)), {})
    log.step(1, {"eval/success_rate": 0.25, "loss/total": 0.125, "grad_norm": math.nan}, 0)
    log.close()


def test_with_torchtunes_tensorboard_logger(make, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "logs/tensorboard"
    run_with(make, {"_component_": f"{LOGGERS}.TensorBoardLogger", "log_dir": str(folder)})
    [run] = folder.iterdir()
    events = EventAccumulator(str(run)).Reload()
    assert {"eval/success_rate", "loss/total", "grad_norm"} <= set(events.Tags()["tensors"])
    [event] = events.Tensors("loss/total")
    assert event.step == 1


def test_with_torchtunes_wandb_logger_offline(make, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    node = {"_component_": f"{LOGGERS}.WandBLogger", "log_dir": str(tmp_path / "logs")}
    groups = [group(), group() | {"answer": ["4", "four"]}, group() | {"answer": 4}]
    run_with(make, node, *groups)
    wandb.teardown()  # offline, `finish` returns before the file is written
    [run] = (tmp_path / "logs/wandb").glob("offline-run-*")
    [record] = run.glob("*.wandb")
    assert b"loss/total" in record.read_bytes()
    [table] = run.glob("files/media/table/rollouts_*.json")
    written = json.loads(table.read_text())
    assert (written["columns"], written["data"]) == rollout_rows(1, groups)
    assert lines(tmp_path, "rollouts") == [{"step": 1, **each} for each in groups]

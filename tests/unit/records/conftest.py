"""The logs of runs."""

import contextlib
from unittest.mock import MagicMock

import pytest

from grpo_components.exchange.event_order import EventOrder
from grpo_components.records.run_log import RunLog
from grpo_components.settings import Settings


@pytest.fixture
def new_log(tmp_path):
    """A run's log over `tmp_path`, and the logger that it feeds."""
    with contextlib.ExitStack() as logs:

        def new(attempt=0, *, resumable=False, events=None, logger=None, **keys):
            keys = {"num_steps": 30, "log_every_n_steps": 1, "eval_only": not resumable, **keys}
            cfg = Settings.model_construct(output_dir=str(tmp_path), **keys)
            logger = logger or MagicMock()
            log = RunLog(cfg, logger, events or EventOrder(attempt))
            logs.callback(log.close)
            return log, logger

        yield new

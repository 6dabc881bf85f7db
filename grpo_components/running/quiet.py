"""Third-party noise: silenced unless the config's `log_level` asks for it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_NOISY_LOGGERS = ("ray", "torchao", "torchtune", "torchrl", "vllm", "datasets", "wandb")


def quiet_libraries(log_level: str) -> None:
    """Let libraries in this process log from `log_level` up, but warn only when it is DEBUG.

    Args:
        log_level: DEBUG, INFO, WARNING or ERROR. At WARNING, libraries log errors only.
    """
    level = {"WARNING": "ERROR"}.get(log_level, log_level)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(level)
    if log_level != "DEBUG":
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def without_prints(log_level: str) -> Iterator[None]:
    """Swallow what a library prints to stdout, unless `log_level` is INFO or DEBUG."""
    if log_level in ("INFO", "DEBUG"):
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield

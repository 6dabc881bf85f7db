"""Third-party noise: silenced unless the config's `log_level` asks for it."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

_NOISY_LOGGERS = ("ray", "torchao", "torchtune", "torchrl", "datasets", "wandb")
_HARMLESS = {
    # At every swap of the weights. Rotary embeddings are computed and not loaded; a tied head is
    # not in the checkpoint, and the engine packs it itself and checks that all else was loaded.
    "vllm.model_executor.model_loader.reload.layerwise": re.compile(
        r"(\w*RotaryEmbedding|ParallelLMHead): Failed to load weights"
    ),
    # With a traceback at every start: our prompts are token ids, so the engine has no tokenizer.
    "vllm.renderers.base": re.compile(r"Chat template warmup failed: .*`skip_tokenizer_init=True`"),
}
"""Messages of vLLM without news, by logger; the text of an exception follows its message."""


def quiet_libraries(log_level: str) -> None:
    """Let libraries in this process log from `log_level` up, but warn only when it is DEBUG.

    Args:
        log_level: DEBUG, INFO, WARNING or ERROR. At WARNING, libraries log errors only, except
            vLLM: its warnings may say that an answer is wrong.
    """
    level = {"WARNING": "ERROR"}.get(log_level, log_level)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(level)
    logging.getLogger("vllm").setLevel(log_level)
    if log_level != "DEBUG":
        warnings.simplefilter("ignore")
        for name in _HARMLESS:
            logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    text = record.getMessage() + (f": {error}" if error else "")
    return not _HARMLESS[record.name].fullmatch(text)


@contextlib.contextmanager
def without_prints(log_level: str) -> Iterator[None]:
    """Swallow what a library prints to stdout, unless `log_level` is INFO or DEBUG."""
    if log_level in ("INFO", "DEBUG"):
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield

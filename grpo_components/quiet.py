"""Keeps libraries quiet below the config's `log_level`; builds vLLM's environment variables."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

_NOISY_LOGGERS = ("ray", "torchao", "torchtune", "torchrl", "datasets", "wandb", "huggingface_hub")
_HARMLESS = {
    # Logged at every weight update. Rotary embeddings are computed, not loaded. A tied head is not
    # in the checkpoint: our engine repacks it, and checks that everything else was loaded.
    "vllm.model_executor.model_loader.reload.layerwise": re.compile(
        r"(\w*RotaryEmbedding|ParallelLMHead): Failed to load weights"
    ),
    # Logged at every start, with a traceback: the engine gets token ids and has no tokenizer.
    "vllm.renderers.base": re.compile(r"Chat template warmup failed: .*`skip_tokenizer_init=True`"),
    # Logged at every start of its CPU build.
    "vllm.triton_utils.importing": re.compile(r"Triton is installed, but doesn't include CPU .*"),
}
"""vLLM logger -> pattern of messages to hide; matches all of `message` or `message: exception`."""


def quiet_libraries(log_level: str) -> None:
    """Set the log level of libraries in this process; Python warnings show at DEBUG only."""
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
    """Context manager that discards prints to stdout, unless `log_level` is INFO or DEBUG."""
    if log_level in ("INFO", "DEBUG"):
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def engine_environment(device: str, log_level: str) -> dict[str, str]:
    """Return environment variables for a generator, to be set before vLLM is imported."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables |= {
            # Dynamo would compile the sampler, which takes seconds at its first use.
            "TORCHDYNAMO_DISABLE": "1",
            # oneDNN keeps a kernel per number of tokens, by default 1,024 of them: 400 MB and more.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        }
    return variables

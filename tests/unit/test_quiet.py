"""What libraries log: vLLM's warnings reach the role's log, and only what is known as noise not."""

import logging
import os
import warnings

import pytest

from grpo_components.quiet import engine_environment, quiet_libraries

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
RENDERER = "vllm.renderers.base"
NO_TOKENIZER = ValueError("Tokenizer not available when `skip_tokenizer_init=True`")


@pytest.fixture(autouse=True)
def settings_of_loggers():
    """As they were before, also Python's warnings."""
    names = ["ray", "torchao", "torchtune", "torchrl", "vllm", "datasets", "wandb"]
    loggers = [logging.getLogger(name) for name in [*names, RELOAD, RENDERER]]
    before = [(logger, logger.level, list(logger.filters)) for logger in loggers]
    for logger in loggers:  # what another test of this process has left
        logger.filters.clear()
    with warnings.catch_warnings():
        yield
    for logger, level, filters in before:
        logger.setLevel(level)
        logger.filters[:] = filters


def logged(caplog, name, message, *args, error=None):
    """Whether a library's warning is written down."""
    caplog.clear()
    logging.getLogger(name).warning(message, *args, exc_info=error)
    return bool(caplog.records)


@pytest.mark.parametrize(
    ("log_level", "ray", "vllm"),
    [
        *((level, True, True) for level in ("DEBUG", "INFO")),
        ("WARNING", False, True),
        ("ERROR", False, False),
    ],
)
def test_of_all_libraries_vllm_alone_warns_at_the_default_level(caplog, log_level, ray, vllm):
    quiet_libraries(log_level)
    assert logged(caplog, "ray.worker", "something") == ray
    assert logged(caplog, "vllm.v1.core.block_pool", "Failed to reset prefix cache") == vllm
    assert engine_environment("cpu", log_level)["VLLM_LOGGING_LEVEL"] == log_level


def test_of_layers_that_were_not_loaded_only_those_without_weights_of_their_own_are_silent(caplog):
    quiet_libraries("WARNING")
    quiet_libraries("WARNING")
    silent = [
        (RELOAD, layer) for layer in ("RotaryEmbedding", "Llama3RotaryEmbedding", "ParallelLMHead")
    ]
    told = [(RELOAD, layer) for layer in ("QKVParallelLinear", "VocabParallelEmbedding")]
    for name, layer in (*silent, *told, (f"{RELOAD}.other", "RotaryEmbedding")):
        shown = logged(caplog, name, "%s: Failed to load weights", layer)
        assert shown == ((name, layer) not in silent)
        assert logged(caplog, name, "%s: Failed to load weights, twice", layer)


def test_the_warm_up_of_a_chat_template_is_silent_only_where_there_is_no_tokenizer(caplog):
    quiet_libraries("WARNING")
    for error in (NO_TOKENIZER, ValueError("out of memory"), None):
        shown = logged(caplog, RENDERER, "Chat template warmup failed", error=error)
        assert shown == (error is not NO_TOKENIZER)


def test_nothing_is_held_back_at_debug(caplog):
    quiet_libraries("DEBUG")
    assert logged(caplog, RELOAD, "%s: Failed to load weights", "RotaryEmbedding")


IN_A_ROLE = """
import sys
from grpo_components.cluster.role_host import RoleHost
RoleHost("generator_0", sys.argv[1], sys.argv[2], "WARNING", 1, {}, [])
from importlib.util import find_spec
from pathlib import Path
from vllm.logger import init_logger
name = "vllm.model_executor.model_loader.reload.layerwise"
file = Path(find_spec("vllm").origin).parents[1] / (name.replace(".", "/") + ".py")
assert "init_logger(__name__)" in file.read_text()  # importing it takes seconds
logger = init_logger(name)
logger.warning("%s: Failed to load weights", "RotaryEmbedding")
logger.warning("%s: Failed to load weights", "QKVParallelLinear")
logger.info("an info")
"""


def test_a_warning_of_vllm_is_in_the_log_of_its_role_and_not_on_the_console(tmp_path, interpreter):
    """vLLM configures its own loggers while it is imported."""
    log = tmp_path / "generator_0.log"
    environment = os.environ | engine_environment("cpu", "WARNING")
    result = interpreter("-c", IN_A_ROLE, log, tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "" and "QKVParallelLinear" not in result.stderr
    written = log.read_text()
    assert "QKVParallelLinear: Failed to load weights" in written
    assert "RotaryEmbedding" not in written and "an info" not in written

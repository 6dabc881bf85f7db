"""The environment variables with which vLLM must be imported."""

from __future__ import annotations


def engine_environment(device: str, log_level: str) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported."""
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

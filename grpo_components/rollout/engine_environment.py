"""The environment variables with which vLLM must be imported."""

from __future__ import annotations


def engine_environment(device: str, log_level: str, kv_cache_gib: int) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported.

    Args:
        device: cpu or cuda.
        log_level: logging level of vLLM.
        kv_cache_gib: memory for the KV cache on a CPU, in GiB.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Dynamo would compile the sampler, which takes seconds at its first use.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib), "TORCHDYNAMO_DISABLE": "1"}
    return variables

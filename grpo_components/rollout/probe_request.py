"""The request by which an engine reads the weight probe, after each swap of weights."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_components.exchange.weight_probe import PROBE_IDS, ProbeReading


def add_probe(
    engine: LLMEngine, scheduler: Any, request_id: str, max_tokens: int, lora: Any
) -> None:
    """Add the probe before all requests that wait: a pull waits for it."""
    prompt = TokensPrompt(prompt_token_ids=list(PROBE_IDS[:max_tokens]))
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
    # vLLM takes such a request past its prefix cache; but what is cached now is of old weights.
    sampling.skip_reading_prefix_cache = False
    engine.add_request(request_id, prompt, sampling, lora_request=lora)
    request = scheduler.requests[next(reversed(scheduler.requests))]
    scheduler.waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)


def probe_reading(output: Any) -> ProbeReading:
    """Return what the engine computed of the probe."""
    (label,) = {int(span.version) for span in output.outputs[0].weight_versions}
    if cached := output.num_cached_tokens:  # vLLM has computed no logprobs of these
        return ProbeReading((), label, cached)
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return ProbeReading([found[token].logprob for found, token in pairs], label, 0)

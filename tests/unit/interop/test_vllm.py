"""A vLLM engine that torchrl wraps, with weights from our parameter server."""

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.weights import pack_bucket
from grpo_components.interop.containers import from_tensordict
from grpo_components.interop.weight_sync import (
    ParameterServerScheme,
    load_into_module,
    load_into_vllm,
)

PROMPTS = ("12 + 7 =", "3 + 4 =", "What is 5?")


@pytest.mark.engine  # of torchrl's wrapper, and not of a fixture
def test_what_a_wrapped_engine_samples_is_of_the_pulled_weights(tiny_policy, monkeypatch):
    """Its trajectories have the logprobs of a transformers model that pulled the same weights."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    from torchrl.modules.llm import vLLMWrapper
    from vllm import LLM

    engine = LLM(
        str(tiny_policy),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**25,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    wrapper = vLLMWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode="tokens",
        pad_output=False,
        return_log_probs=True,
        generate_kwargs={"max_tokens": 8, "temperature": 1.0, "seed": 3},
    )
    numbers = torch.Generator().manual_seed(0)
    stored = load_file(tiny_policy / "model.safetensors")
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=numbers)
        for name, tensor in stored.items()
    }
    server, bucket = VLLMParameterServer(), pack_bucket(list(weights.items()))
    server.push(4, [bucket], [bucket[0]])
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    for policy, load in ((wrapper, load_into_vllm), (model, load_into_module)):
        scheme = ParameterServerScheme(server.newest, list, load)
        scheme.init_on_receiver(model_id="policy", model=policy)
        scheme.connect()
        assert scheme.receive() is not None and scheme.version == 4
    rows = [Tokens(prompt=torch.tensor(tokenizer(text)["input_ids"])) for text in PROMPTS]
    sampled = wrapper(lazy_stack([TensorDict(tokens=row) for row in rows], 0))
    for each in from_tensordict(sampled, policy_version=4):
        assert (each.token_versions == 4).all() and each.response_mask.all()
        ids = torch.tensor([*each.prompt_ids, *each.response_ids])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        own = logprobs[torch.arange(len(ids) - 1), ids[1:]][len(each.prompt_ids) - 1 :]
        assert own.tolist() == pytest.approx(each.generator_logprobs.tolist(), abs=1e-4)
    broken = pack_bucket([(name, tensor) for name, tensor in weights.items() if "norm" in name])
    server.push(5, [broken], [broken[0]])
    for load, policy in ((load_into_vllm, wrapper), (load_into_module, model)):
        scheme = ParameterServerScheme(server.newest, list, load)
        scheme.init_on_receiver(model_id="policy", model=policy)
        with pytest.raises(ValueError, match=r"^weights: missing tensor "):
            scheme.pull()

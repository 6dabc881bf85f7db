"""What tests ask of a real engine, and what its answers must be."""

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

PROMPTS = [[5, 6, 7, i + 1] for i in range(8)]


def weights(path):
    return load_file(path / "model.safetensors")


def submit(engine, max_tokens=24):
    return [
        engine.submit(ids, max_tokens=max_tokens, temperature=1.0, seed=i, stop_token_ids=[])
        for i, ids in enumerate(PROMPTS)
    ]


def assert_same(left, right):
    """Bit for bit."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def whole_logprobs(path, prompt, completion):
    """Logprobs of a completion by transformers, in one forward pass."""
    model = Qwen2ForCausalLM.from_pretrained(path).float()
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
    return logprobs[torch.arange(len(ids) - 1), ids[1:]][len(prompt) - 1 :].numpy()

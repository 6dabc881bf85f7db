"""What tests ask of a real engine, and what its answers must be."""

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from grpo_components.trajectory import TokenSequence
from lib.logprobs import whole_logprobs

PROMPTS = [[5, 6, 7, i + 1] for i in range(8)]


def weights(path):
    return load_file(path / "model.safetensors")


def ask(engine, prompt, max_tokens=24, **options):
    defaults = {"temperature": 1.0, "seed": 0, "stop_token_ids": []}
    return engine.submit(prompt, max_tokens=max_tokens, **defaults | options)


def submit(engine, max_tokens=24, **options):
    return [ask(engine, ids, max_tokens, seed=i, **options) for i, ids in enumerate(PROMPTS)]


def done(futures):
    return [future.result(timeout=60) for future in futures]


def under_way(engine, max_tokens=400):
    """Ask for responses; returns when they are well on their way."""
    running = submit(engine, max_tokens)
    ask(engine, [9, 9], 30).result(timeout=60)
    return running


def assert_exact_over_a_swap(engine, old, new, recompute):
    """Check that requests go on while new weights load, and that each token has its version."""
    running, given = under_way(engine), weights(new)
    engine.load_weights(1, given).result(timeout=60)
    for tensor in given.values():  # the next delta push changes these bytes
        tensor.zero_()
    gaps_to_old = []
    for prompt, completion in zip(PROMPTS, done(running), strict=True):
        versions = completion.token_versions
        assert set(np.diff(versions)) <= {0, 1}
        first = versions == 0
        gap_to_old = np.abs(completion.logprobs - logprobs_of(old, prompt, completion))
        assert gap_to_old[first].max() < 1e-4
        if versions[-1] == 1:
            gaps_to_old.append(gap_to_old[~first][0])
            gap = np.abs(completion.logprobs - logprobs_of(new, prompt, completion))[~first]
            # With recomputed KV the later tokens are the new policy's; with the old KV they mix.
            assert (gap.max() < 1e-4) == recompute
    assert gaps_to_old, "no response was running during the swap"
    assert max(gaps_to_old) > 1e-2, "what the old weights sampled last has the new version"


def assert_same(left, right, atol=0.0):
    """Check for the same tokens, with the same logprobs: to the bit, or up to a gap of `atol`."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=atol)


def logprobs_of(path, prompt, completion, change=lambda model: None):
    """Compute a completion's logprobs with transformers, in one pass; `change` edits the model."""
    model = Qwen2ForCausalLM.from_pretrained(path).float()
    change(model)
    sequence = TokenSequence(np.array(prompt), completion.token_ids, 1.0)
    with torch.no_grad():
        return whole_logprobs(model, sequence)[0].numpy()

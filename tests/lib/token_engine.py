"""Stands for an engine that samples token by token, for tests of code that scores tokens again."""

import numpy as np
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from lib.trajectories import trajectory

VOCABULARY = 50


def policy(version):
    torch.manual_seed(version)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval()


@torch.inference_mode()
def sample(policies, prompt, versions, temperature=1.0, recompute=False):
    """Sample a response token by token, each with the policy of its version."""
    random = torch.Generator().manual_seed(len(prompt) + len(versions))
    ids, logprobs, kv, last = list(prompt), [], None, None
    for version in versions:
        if kv is None or (recompute and version != last):
            kv = DynamicCache()
        last = version
        new = torch.tensor([ids[kv.get_seq_length() :]])
        logits = policies[version](input_ids=new, past_key_values=kv, use_cache=True).logits[0, -1]
        each = (logits / temperature).log_softmax(-1)
        ids.append(int(torch.multinomial(each.exp(), 1, generator=random)))
        logprobs.append(float(each[ids[-1]]))
    return trajectory(
        ids[len(prompt) :],
        prompt_ids=np.array(prompt),
        generator_logprobs=np.array(logprobs, np.float32),
        token_versions=np.array(versions, np.int32),
        temperature=temperature,
    )

"""The sizes of the smallest policies, and random weights and tokens for them."""

import numpy as np
import torch

from grpo_components.trajectory import TokenSequence

SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"embed_dim": 32, "intermediate_dim": 48, "max_seq_len": 64}
"""Sizes of a torchtune decoder."""
TRANSFORMERS_SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
"""Sizes of a model of transformers."""
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def random_weights(model, std=0.2):
    """Fill the model, always with the same weights; returns it."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def random_responses(*groups):
    """Return random sequences; a group is (length of its prompt, lengths of its responses)."""
    rng, found = np.random.default_rng(0), []
    for length, responses in groups:
        prompt = rng.integers(0, 64, length)
        found += [TokenSequence(prompt, rng.integers(0, 64, size), 0.8) for size in responses]
    return found

"""Sampling, lengths and engine: what vLLM or the base model cannot do is refused by its key."""

import pytest
from lib.config_errors import refused_key

from grpo_components.config.files import check_against_model, check_tensor_parallel

HF_CONFIG = {"vocab_size": 384, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("name", "fits", "wrong"),
    [
        ("stop_token_ids", [0, 383], [384]),
        ("stop_token_ids", [0], [1, -1]),
        ("max_model_len", 512, 513),
        ("max_response_tokens", 448, 449),
    ],
)
def test_tokens_and_lengths_are_those_of_the_model(settings_with, name, fits, wrong):
    def given(value):
        return settings_with(dataset__max_prompt_tokens=64, **{f"generator__{name}": value})

    check_against_model(given(fits), HF_CONFIG)
    assert refused_key(check_against_model, given(wrong), HF_CONFIG) == f"generator.{name}"


SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,  # padded to 1024
}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])  # 4 and 8 workers replicate the 2 kv heads
def test_layers_that_can_be_shared_are_accepted(workers):
    check_tensor_parallel(workers, SIZES)
    check_tensor_parallel(workers, {"num_attention_heads": 8})  # as many kv heads


@pytest.mark.parametrize(
    ("workers", "sizes"),
    [
        (3, {}),
        (4, {"intermediate_size": 98}),
        (3, {"num_attention_heads": 12}),  # the padded vocabulary
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}),
    ],
)
def test_every_size_that_is_split_must_fit(workers, sizes):
    key = "generator.tensor_parallel_size"
    assert refused_key(check_tensor_parallel, workers, SIZES | sizes) == key

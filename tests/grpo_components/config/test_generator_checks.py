"""What vLLM can split over workers, from `config.json` alone."""

import pytest

from grpo_components.config.generator_checks import check_tensor_parallel

SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,  # padded to 1024
}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])  # 4 and 8 workers replicate the 2 kv heads
def test_layers_that_can_be_shared_are_accepted(workers):
    check_tensor_parallel(workers, SIZES)


@pytest.mark.parametrize(
    ("workers", "sizes", "name", "allowed"),
    [
        (3, {}, "num_attention_heads: 8", "1, 2, 4, 8"),
        (4, {"intermediate_size": 98}, "intermediate_size: 98", "1, 2"),
        (3, {"num_attention_heads": 12}, "padded vocab_size: 1024", "1, 2, 4"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "key_value_heads: 6", "1, 2"),
    ],
)
def test_every_size_that_is_split_must_fit(workers, sizes, name, allowed):
    problem = rf"^generator.tensor_parallel_size: {workers} given, .*{name}.*; allowed: {allowed}$"
    with pytest.raises(ValueError, match=problem):
        check_tensor_parallel(workers, {**SIZES, **sizes})


def test_a_model_without_kv_heads_has_as_many_as_heads():
    check_tensor_parallel(4, {"num_attention_heads": 4})

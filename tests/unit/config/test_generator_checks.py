"""What vLLM can run, and split over workers, from `config.json` alone."""

import pytest

from grpo_components.config.generator_checks import check_cpu_engine, check_tensor_parallel

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


EXPERTS = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 48}


@pytest.mark.parametrize("changes", [{}, {"num_experts": 0, "hidden_size": 8}])
def test_experts_that_vllm_computes_on_a_cpu_are_accepted(changes):
    check_cpu_engine(EXPERTS | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"hidden_size": 48}, "hidden_size: 48"), ({"model_type": "gpt_oss"}, "mediate_size: 48")],
)
def test_widths_for_which_vllm_has_no_kernel_on_a_cpu_are_refused(changes, name):
    with pytest.raises(ValueError, match=rf"^base_model_path: .*{name}.*allowed: .* 32$"):
        check_cpu_engine(EXPERTS | changes)


def test_a_family_that_the_engine_computes_otherwise_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"^base_model_path: a model of cohere2 given, .*7\.0e-4"):
        check_cpu_engine({"model_type": "cohere2"})

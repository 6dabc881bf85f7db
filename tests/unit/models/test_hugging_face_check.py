"""The trial before a run passes models whose logprobs are right, and says why others are not."""

import pytest
import torch
from transformers import AutoConfig

from grpo_components.models import hugging_face, hugging_face_attention
from grpo_components.models.hugging_face_check import check_hugging_face
from grpo_components.models.tensor_parallel import transformers_plan


def build(family, folder, **options):
    """The policy of a family in its real size, without weights."""
    AutoConfig.for_model(family, **options).save_pretrained(folder)
    with torch.device("meta"):
        return hugging_face(str(folder))


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2"),
        *("olmo3", "gpt_oss", "glm4", "cohere2", "granite", "deepseek_v3"),
    ],
)
def test_a_family_passes_and_leaves_the_random_numbers_as_they_were(family, tmp_path):
    model, state = build(family, tmp_path), torch.get_rng_state()
    check_hugging_face(model, longest=100)
    assert torch.equal(torch.get_rng_state(), state)


REFUSED = {
    "mamba": "^model: Mamba.* gives other logprobs when a prompt is computed once.*decoder",
    "bloom": "^model: BloomForCausalLM gives other logprobs.*; allowed: a decoder",
    "gpt_neo": "^model.path: .*; allowed: the folder of a causal",
    "falcon": "^model.path: .*; allowed: the folder of a causal",
    "bert": "has no list of decoder layers",
    "opt": "has no list of decoder layers",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused(family, tmp_path):
    """It mixes tokens in another way, its attention cannot be exchanged, or it has no layers."""
    with pytest.raises(ValueError, match=REFUSED[family]):
        check_hugging_face(build(family, tmp_path), longest=100)


@pytest.mark.parametrize(
    ("family", "without"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")],
)
def test_the_trial_sees_what_attention_leaves_out(family, without, tmp_path, monkeypatch):
    whole = hugging_face_attention.attention

    def partly(*args, **kwargs):
        return whole(*args, **kwargs | {without: None})

    monkeypatch.setattr(hugging_face_attention, "attention", partly)
    try:
        with pytest.raises(ValueError, match="gives other logprobs"):
            check_hugging_face(build(family, tmp_path), longest=100)
    finally:
        monkeypatch.undo()
        hugging_face_attention.register()


def test_rotary_tables_of_the_batch_are_refused_beyond_their_bound(tmp_path):
    scaling = {
        **{"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        **{"rope_theta": 1e4, "original_max_position_embeddings": 4096},
    }
    model = build("phi3", tmp_path, rope_parameters=scaling)
    check_hugging_face(model, longest=4096)
    with pytest.raises(ValueError, match="longrope given with sequences of 4097 tokens"):
        check_hugging_face(model, longest=4097)


@pytest.mark.parametrize(
    ("family", "problem"), [("qwen3_moe", "packed_colwise"), ("gpt2", "no plan")]
)
def test_a_tensor_parallel_plan_that_is_missing_is_refused(family, problem, tmp_path):
    with pytest.raises(ValueError, match=rf"^tensor_parallel_dim: .*{problem}.*; allowed: 1"):
        transformers_plan(build(family, tmp_path))


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^model.path: no file .*config.json; allowed:"):
        hugging_face(str(tmp_path))

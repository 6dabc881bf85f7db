"""A transformers model gives the logprobs and gradients of its own code, with each prompt once."""

import gc
from pathlib import Path

import pytest
import torch
from lib.logprobs import whole_logprobs
from lib.policies import TRANSFORMERS_SIZES, WINDOW, random_responses, random_weights
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_components.models import hugging_face
from grpo_components.models.hugging_face_policy import decoder_layers, logits_of, longest_sequence
from grpo_components.models.logprobs import ResponseLogprobs, token_batch

CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
# What the families of the equivalence ladder do not have: tight caps, dropout, a scale.
FAMILIES = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW, **CAPS},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "attention_dropout": 0.4},
}
IN_GROUPS = random_responses((6, [9, 1, 11]), (2, [3]), (4, [7]))
MIXED = [IN_GROUPS[number] for number in (0, 3, 1, 2, 4)]


def folder_of(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(family, **TRANSFORMERS_SIZES | FAMILIES[family])
    random_weights(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_models_own_code(family, tmp_path):
    folder = folder_of(family, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ours = hugging_face(str(folder))
    tied = ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    assert tied is own.config.tie_word_embeddings
    ours.load_state_dict({k: v for k, v in own.state_dict().items() if k in ours.state_dict()})
    assert longest_sequence(ours) == 64
    expected = torch.cat([whole_logprobs(own, sequence)[0] for sequence in MIXED])
    found, entropies = ResponseLogprobs(ours, chunk_tokens=7)(token_batch(MIXED))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(decoder_layers(ours)) == 2
    weights = torch.linspace(-1, 2, len(found))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    gradients = dict(own.named_parameters())
    assert len(list(ours.parameters())) == len(gradients)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-4, msg=name
        )
    assert not entropies.requires_grad


def test_hidden_states_are_freed_without_the_garbage_collector(tmp_path):
    model = hugging_face(str(folder_of("qwen3", tmp_path)))
    gc.collect()
    gc.disable()
    try:
        logits_of(model, torch.randn(3, 32))
        kept = [each for each in gc.get_objects() if type(each).__name__ == "_WithHidden"]
    finally:
        gc.enable()
    assert not kept

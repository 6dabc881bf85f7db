"""A transformers model gives the logprobs and gradients of its own code, with each prompt once."""

import gc
from pathlib import Path

import pytest
import torch
from lib.logprobs import whole_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_components.models import hugging_face
from grpo_components.models.hugging_face_policy import decoder_layers, logits_of, longest_sequence
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.trajectory import TokenSequence

SIZES = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
# What the families of the equivalence ladder do not have: tight caps, dropout, a scale.
FAMILIES = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW, **CAPS},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "attention_dropout": 0.4},
}


def folder_of(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def sequences() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(0, 50, (count,), generator=generator).numpy()

    first, second = ids(6), ids(2)
    pairs = [(first, 9), (second, 3), (first, 1), (first, 11), (ids(4), 7)]
    return [TokenSequence(prompt, ids(count), 0.8) for prompt, count in pairs]


def alone(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([whole_logprobs(model, sequence)[0] for sequence in sequences()])


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_models_own_code(family, tmp_path):
    folder = folder_of(family, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ours = hugging_face(str(folder))
    tied = ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    assert tied is own.config.tie_word_embeddings
    ours.load_state_dict({k: v for k, v in own.state_dict().items() if k in ours.state_dict()})
    assert longest_sequence(ours) == 64
    expected = alone(own)
    found, entropies = ResponseLogprobs(ours, chunk_tokens=7)(token_batch(sequences()))
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
        logits_of(model, torch.randn(3, SIZES["hidden_size"]))
        kept = [each for each in gc.get_objects() if type(each).__name__ == "_WithHidden"]
    finally:
        gc.enable()
    assert not kept

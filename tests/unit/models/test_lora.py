"""Adapters: what is trained, and that their export means the same for Hugging Face's models."""

import pytest
import torch
from equivalence.families import FAMILIES, random_checkpoint
from lib.trainer_ranks import checkpointer_of
from peft import PeftModel
from torchtune.modules.peft import LoRALinear
from transformers import AutoModelForCausalLM

from grpo_components.models.hf_weights import hf_converter
from grpo_components.models.lora import (
    AdapterNames,
    adapted_model,
    is_adapter,
    merged,
    new_adapters,
    pushed_shapes,
    read_adapter_options,
    trained_parameters,
)
from grpo_components.settings import LoraSettings
from grpo_components.training.checkpoint import save_adapter

LORA = LoraSettings(rank=3, alpha=12.0)  # on all layers


def of_family(family):
    fused = LORA.fused_targets(family.model_type)
    targets = tuple(name for name in LORA.target_modules if name not in fused)
    return LORA.model_copy(update={"target_modules": targets})


# Biases, rows in another order, heads of a width of their own, fused layers.
KINDS = ("QWEN2 (tied)", "LLAMA3", "LLAMA3_2", "GEMMA", "PHI4")


@pytest.fixture(params=KINDS)
def adapted(request, tmp_path):
    """A family's base model on disk, and its policy with adapters that are not zero."""
    family = FAMILIES[request.param]
    base, lora = random_checkpoint(family, tmp_path / "base", seed=0), of_family(family)
    model = adapted_model(family.build_model, lora, "fp32")
    checkpointer = checkpointer_of(base, tmp_path / "unused", family.model_type)()
    model.load_state_dict(checkpointer.load_checkpoint()["model"], strict=False)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2)
    return family, base, lora, model


def test_peft_and_merged_weights_compute_the_same_logits(adapted, tmp_path, monkeypatch):
    # peft refuses torchtune's torchao, which it does not need here.
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    family, base, lora, model = adapted
    convert = AdapterNames(hf_converter(family.model_type, base))
    state = model.state_dict()
    adapter = convert({name: state[name] for name in state if is_adapter(name)})
    assert {name: tuple(t.shape) for name, t in adapter.items()} == pushed_shapes(base, lora)
    save_adapter(adapter, lora, base, tmp_path)
    assert read_adapter_options(tmp_path / "adapter") == lora
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        before = plain(tokens).logits
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        found, expected = loaded(tokens).logits, model(tokens)
    assert (found - before).abs().max() > 0.1 * before.abs().max()
    close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(found, expected, **close)
    whole = family.build_model()
    whole.load_state_dict(merged(state, lora.scale))
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens), expected, **close)


def test_only_adapters_are_trained_and_the_rest_is_in_the_compute_dtype():
    lora = LoraSettings(rank=3, alpha=12.0, target_modules=("q_proj", "down_proj"))
    with torch.device("meta"):
        model = adapted_model(FAMILIES["QWEN2 (tied)"].build_model, lora, "bf16")
    kinds = [name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    assert sorted(kinds) == ["q_proj", "q_proj", "w2", "w2"]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    assert len(trained_parameters(model)) == 8


def test_a_new_adapter_depends_on_the_seed_alone_and_changes_nothing():
    model = adapted_model(FAMILIES["QWEN2 (tied)"].build_model, LORA, "fp32")

    def new(seed):
        torch.manual_seed(seed)
        torch.rand(seed)
        return new_adapters(model)

    first, same, other = new(1), new(1), new(2)
    a, b = ([name for name in first if name.endswith(f"lora_{kind}.weight")] for kind in "ab")
    assert len(a) == len(b) == 14
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in a)
    assert not any(first[name].any() for name in b)
    bound = 1 / first[a[0]].shape[1] ** 0.5  # as torchtune and peft draw A
    assert 0.8 * bound < first[a[0]].abs().max() <= bound


@pytest.mark.parametrize("text", ["", "{}", '{"r": 0, "lora_alpha": 1, "target_modules": []}'])
def test_a_folder_that_is_no_adapter_is_refused(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read_adapter_options(tmp_path)

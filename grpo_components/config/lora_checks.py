"""Checks the section `lora` against the keys that adapters rule out."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from grpo_components.errors import fail, shown
from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.models.hf_weights import file_converter
from grpo_components.models.lora import (
    AdapterNames,
    adapted_layers,
    adapted_model,
    fused_targets,
    is_adapter,
    lora_options,
    pushed_shapes,
)
from grpo_components.objective.schedules import as_schedule
from grpo_components.settings import Settings


def check_lora(settings: Settings) -> None:
    """Refuse keys that do not go with adapters."""
    lora = lora_options(settings.lora)
    if lora is None:
        return
    checkpointer = settings.checkpointer  # none for a transformers model
    model_type = checkpointer["model_type"] if checkpointer else ""
    if fused := fused_targets(model_type, lora):
        problem = f"{', '.join(fused)} given with checkpointer.model_type: {model_type}, whose "
        problem += "Hugging Face models have them in a fused layer"
        fail("lora.target_modules", problem, "o_proj, down_proj")
    if settings.weights != "object_store":
        problem = f"{settings.weights} given with lora, and vLLM's transfer engines load whole "
        fail("weights", f"{problem}models", "object_store, or lora: null")
    if settings.tensor_parallel_dim > 1:
        problem = f"{settings.tensor_parallel_dim} given with lora, whose adapters have no plan"
        fail("tensor_parallel_dim", problem, "1 (more num_trainers shard the model)")
    if as_schedule("kl_coeff", settings.reward_shaping.kl_coeff).highest > 0:
        problem = f"{shown(settings.reward_shaping.kl_coeff)} given with lora, where the trainers "
        problem += "compute the reference's logprobs, after the rewards were shaped"
        fail("reward_shaping.kl_coeff", problem, "0; loss.kl_coeff or advantages.kl_coeff instead")


def check_adapters(settings: Settings, model: nn.Module) -> None:
    """Refuse adapters that trainer and generators would place in different layers."""
    lora = lora_options(settings.lora)
    if lora is None:
        return
    base = Path(settings.base_model_path)
    policy = adapted_model(lambda: model, lora, settings.dtype)
    if lacking := set(lora.target_modules) - (present := adapted_layers(policy)):
        problem = f"{', '.join(sorted(lacking))} given, of which `model` has no layer"
        fail("lora.target_modules", problem, ", ".join(sorted(present)) or "lora: null")
    state = policy.state_dict()
    named = AdapterNames(file_converter(model, settings.model_type, base))(
        {name: tensor for name, tensor in state.items() if is_adapter(name)}
    )
    try:
        check_names_and_shapes(shapes_of(named), pushed_shapes(base, lora))
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        fail("lora.target_modules", problem, "layers of both `model` and base_model_path")

"""Replaces the LoRA adapter of a vLLM engine between two steps, for new and running requests."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_components.models.lora import ADAPTER_FILE, peft_config, reserved_rank
from grpo_components.settings import LoraSettings

ADAPTER = LoRARequest("policy", 1, lora_path="(it is loaded)")
"""The adapter of every request. Its name stays, so that running requests go on with a new one: the
caller empties the prefix cache, which vLLM keys by the name."""


def adapter_arguments(lora: LoraSettings) -> dict[str, Any]:
    """Return vLLM's arguments for an engine with one adapter."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": reserved_rank(lora),
        "lora_target_modules": list(lora.target_modules),  # else vLLM has room in every layer
    }


def swap_adapter(
    engine: LLMEngine, lora: LoraSettings, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replace the adapter of all requests; tensors are on the CPU, by peft's names."""
    with tempfile.TemporaryDirectory(prefix="grpo-adapter-") as folder:
        # Copies: a file cannot hold the views of one buffer that a pull gives.
        save_file({n: t.clone() for n, t in tensors.items()}, Path(folder, ADAPTER_FILE))
        Path(folder, "adapter_config.json").write_text(json.dumps(peft_config(lora, "")))
        name, number = ADAPTER.lora_name, ADAPTER.lora_int_id
        if not engine.add_lora(LoRARequest(name, number, folder, load_inplace=True)):
            raise RuntimeError("vLLM did not load the adapter")

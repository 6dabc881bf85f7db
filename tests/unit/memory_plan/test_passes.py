"""What a deep model takes follows from two shorter ones."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchtune.models.qwen2 import qwen2

from grpo_components.config.reading import read_settings
from grpo_components.trajectory import TokenSequence
from grpo_tools.memory_plan import passes

SIZES = {"vocab_size": 300, "num_layers": 7, "embed_dim": 32, "intermediate_dim": 64}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64, "tie_word_embeddings": True}
BUILD = partial(qwen2, **SIZES, **HEADS)
SEQUENCES = [TokenSequence(np.full(9, n // 2), np.zeros(20, np.int64), 1.0) for n in range(6)]


CONFIG: Any = OmegaConf.load(Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml")
CFG = read_settings(CONFIG).model_copy(update={"dtype": "bf16", "logprob_chunk_tokens": 16})


def training_bytes(has_gradients, **changes):
    cfg = CFG.model_copy(update=changes)
    return passes.training_bytes(cfg, BUILD, SEQUENCES, has_gradients)


@pytest.fixture(autouse=True)
def _no_garbage_of_other_tests():
    """A vLLM engine that is collected in a pass raises there, and its traceback keeps tensors."""
    gc.collect()


LAYOUTS = {
    "whole": {},
    "sharded, checkpointing": {"enable_activation_checkpointing": True, "num_trainers": 3},
    "tensor parallel": {"num_trainers": 4, "tensor_parallel_dim": 2},
    "replicated": {"num_trainers": 4, "data_parallel_replicate_dim": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deep_model_follows_from_shorter_ones(layout, monkeypatch):
    changes = LAYOUTS[layout]
    short = training_bytes(True, **changes)
    monkeypatch.setattr(passes, "_MORE", 7)  # now the model itself is run
    whole = training_bytes(True, **changes)
    assert short == pytest.approx(whole, rel=0.001)


def test_so_does_a_reference(monkeypatch):
    short = passes.inference_bytes(CFG, BUILD, SEQUENCES)
    monkeypatch.setattr(passes, "_MORE", 7)
    assert passes.inference_bytes(CFG, BUILD, SEQUENCES) == short
    with torch.device("meta"):
        parameters = sum(p.numel() for p in BUILD().parameters())
    assert 2 * parameters <= short["weights"] <= 2.2 * parameters  # and the rotary table


def test_shards_gradients_and_moments_are_a_ranks_part_in_float32():
    found = training_bytes(False, num_trainers=4)
    with torch.device("meta"):
        whole = sum(4 * p.numel() for p in BUILD().parameters())
    assert found["gradients"] == pytest.approx(whole / 4, rel=0.02)
    assert found["optimizer"] == pytest.approx(whole / 2, rel=0.02)


def test_checkpointing_keeps_fewer_activations_and_a_second_pass_finds_gradients():
    kept = training_bytes(False)
    again = training_bytes(False, enable_activation_checkpointing=True)
    assert again["activations"] < kept["activations"] / 3
    second = training_bytes(True)
    name = "peak of logits, backward"
    assert second[name] == pytest.approx(kept[name] + kept["gradients"], rel=0.05)

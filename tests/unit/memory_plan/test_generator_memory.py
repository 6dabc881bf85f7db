"""A generator's memory: weights and cache are shared by its workers; vLLM's share bounds them."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.models import qwen2_5

from grpo_components.config.reading import read_settings
from grpo_tools.memory_plan.generator_memory import generator_memory
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import GIB, Device
from grpo_tools.memory_plan.transfer_memory import transfer_bytes

GPU = Device(is_gpu=True, gib=80.0)
SIZES = ModelSizes.of(qwen2_5.qwen2_5_7b_base)


CONFIG = Path(__file__).parents[3] / "recipes/configs/qwen7B_async_grpo.yaml"


def memory(**changes):
    given = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    given["generator"] |= changes
    return generator_memory(read_settings(given), SIZES, 512, GPU)


def test_weights_and_cache_fill_vllms_share():
    found = memory(gpu_memory_utilization=0.85)
    loading = max(SIZES.units) * 2
    assert found.total == pytest.approx(0.85 * 80 * GIB + loading, rel=1e-6)
    assert sum(found.parts.values()) == found.total


def test_workers_share_weights_and_the_bytes_of_a_token():
    one, two = memory(), memory(tensor_parallel_size=2)
    assert two.count == 2 * one.count
    assert two.parts["weights"] == one.parts["weights"] // 2
    alone, shared = (SIZES.kv_bytes_per_token("bf16", workers) for workers in (1, 2))
    assert two.parts["KV cache"] / shared > 2 * one.parts["KV cache"] / alone


def test_a_token_of_qwen2_5_7b_has_56_kib_of_keys_and_values():
    # 28 layers x 4 heads x 128 x keys and values x 2 bytes: its config.json
    assert SIZES.kv_bytes_per_token("bf16") == 28 * 4 * 128 * 2 * 2
    assert SIZES.kv_bytes_per_token("bf16", workers=8) == SIZES.kv_bytes_per_token("bf16", 4)


def test_the_longest_bucket_holds_its_share_of_whole_layers():
    for ranks in (1, 3, 7):
        largest = SIZES.largest_bucket("bf16", ranks)
        assert SIZES.snapshot_bytes("bf16") / ranks <= largest
    assert SIZES.largest_bucket("bf16", 1) == SIZES.snapshot_bytes("bf16")


def test_weights_that_come_over_nccl_need_two_buffers_beside_the_loaded_layer():
    """Each has up to one tensor more than it holds: 3584 x 152064 numbers of the embedding."""
    given = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    assert transfer_bytes(read_settings(given), SIZES) == (0, 0)
    nccl = read_settings(given | {"weights": "nccl"})
    embedding = 2 * 3584 * 152064
    assert transfer_bytes(nccl, SIZES) == (3 * (2**28 + embedding), 2 * (2**28 + embedding))
    more = generator_memory(nccl, SIZES, 512, GPU).total - memory().total
    assert more == 2 * (2**28 + embedding)

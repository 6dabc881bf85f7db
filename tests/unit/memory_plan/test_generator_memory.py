"""What a generator and the pushes to it take, on its GPU and in CPU memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchtune.models import qwen2_5

from grpo_components.config.reading import read_settings
from grpo_tools.memory_plan.generator_memory import generator_memory, transfer_bytes
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.plan import _store_problem, object_store_bytes
from grpo_tools.memory_plan.role_memory import GIB, Device, gib
from grpo_tools.memory_plan.trainer_memory import host_bytes

GPU = Device(is_gpu=True, gib=80.0)
SIZES = ModelSizes.of(qwen2_5.qwen2_5_7b_base)
SNAPSHOT = SIZES.snapshot_bytes("bf16")
CONFIG = Path(__file__).parents[3] / "recipes/configs/qwen7B_async_grpo.yaml"
GIVEN: Any = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)


def settings(**changes):
    return read_settings({**GIVEN, **changes})


def memory(**changes):
    cfg = settings(generator={**GIVEN["generator"], **changes})
    return generator_memory(cfg, SIZES, 512, GPU)


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


def test_weights_that_come_over_nccl_need_two_buffers_beside_the_loaded_layer():
    """Each has up to one tensor more than it holds: 3584 x 152064 numbers of the embedding."""
    assert transfer_bytes(settings(), SIZES) == (0, 0)
    nccl = settings(weights="nccl")
    embedding = 2 * 3584 * 152064
    assert transfer_bytes(nccl, SIZES) == (3 * (2**28 + embedding), 2 * (2**28 + embedding))
    more = generator_memory(nccl, SIZES, 512, GPU).total - memory().total
    assert more == 2 * (2**28 + embedding)


@pytest.mark.parametrize("workers", [1, 2])
def test_with_deltas_every_generator_holds_a_copy_and_every_rank_its_share_thrice(workers):
    def host(push):
        options = {**GIVEN["generator"], "tensor_parallel_size": workers}
        cfg = settings(push=push, async_checkpoint=False, generator=options)
        found = generator_memory(cfg, SIZES, 512, GPU)
        ranks = cfg.num_trainers * host_bytes(cfg, SIZES)["push"]
        return found.count * found.host.get("push", 0), ranks, object_store_bytes(cfg, SIZES)

    whole, delta = host("whole"), host("delta")
    assert (whole[0], delta[0]) == (0, GIVEN["num_generators"] * SNAPSHOT)
    assert delta[1] == 3 * whole[1] >= 3 * SNAPSHOT
    assert (whole[2], delta[2]) == ((3, 3 * SNAPSHOT), (5, 5 * SNAPSHOT))


def test_each_replica_of_the_shards_copies_the_whole_state_for_a_checkpoint():
    for tensor, replicas, shards in ((1, 1, 8), (1, 2, 4), (2, 2, 4), (2, 4, 2)):
        ranks = {"num_trainers": 8, "tensor_parallel_dim": tensor}
        ranks |= {"data_parallel_replicate_dim": replicas, "async_checkpoint": True}
        assert host_bytes(settings(**ranks), SIZES)["checkpoint"] == 12 * SIZES.trained // shards


def test_pushes_must_fit_what_ray_takes_for_its_object_store_by_default():
    large = replace(SIZES, units=[5 * unit for unit in SIZES.units])
    assert not [*_store_problem(settings(), SIZES)]
    (problem,) = _store_problem(settings(), large)
    known = "object_store_memory: null given, and Ray takes at most 186 GiB, and 3 pushes take "
    assert problem == f"{known}{gib(15 * SNAPSHOT)} GiB; allowed: {15 * SNAPSHOT} or more"
    assert not [*_store_problem(settings(object_store_memory=15 * SNAPSHOT), large)]

"""What pushes take in CPU memory: more with deltas, and no less than what is held at once."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.models import qwen2_5

from grpo_components.config.reading import read_settings
from grpo_tools.memory_plan.generator_memory import generator_memory
from grpo_tools.memory_plan.host_memory import HostMemory
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import Device, RoleMemory
from grpo_tools.memory_plan.trainer_memory import _host

SIZES = ModelSizes.of(qwen2_5.qwen2_5_7b_base)
SNAPSHOT = SIZES.snapshot_bytes("bf16")
CONFIG = Path(__file__).parents[3] / "recipes/configs/qwen7B_async_grpo.yaml"


def settings(push, **changes):
    given = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    given["async_checkpoint"] = False
    return read_settings({**given, "push": push, **changes})


def host_memory(push, is_gpu=True, **changes):
    cfg = settings(push, **changes)
    generator = generator_memory(cfg, SIZES, 512, Device(is_gpu, 80.0))
    trainer = RoleMemory("trainer", cfg.num_trainers, 1.0, 0, {}, _host(cfg, SIZES))
    return cfg, generator, HostMemory.of(cfg, SIZES, [generator, trainer])


@pytest.mark.parametrize("workers", [1, 2])
def test_with_deltas_every_generator_holds_a_copy_and_every_rank_its_share_thrice(workers):
    given = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)["generator"]
    options = {"generator": {**given, "tensor_parallel_size": workers}}
    cfg, _, whole = host_memory("whole", **options)
    _, _, delta = host_memory("delta", **options)
    assert (whole.generators, delta.generators) == (0, cfg.num_generators * SNAPSHOT)
    assert delta.trainers == 3 * whole.trainers >= 3 * SNAPSHOT
    assert (whole.object_store, delta.object_store) == (3 * SNAPSHOT, 5 * SNAPSHOT)
    assert sum("all generators" in line for line in delta.lines()) == 1
    assert not any("all generators" in line for line in whole.lines())


def test_on_a_cpu_the_copy_is_in_the_generators_sum():
    (_, whole, _), (_, delta, found) = (host_memory(push, False) for push in ("whole", "delta"))
    assert delta.total - whole.total == delta.parts["push"] == SNAPSHOT
    assert found.generators == 0 and "push" not in whole.parts


@pytest.mark.parametrize(("push", "snapshots"), [("whole", 3), ("delta", 5)])
def test_a_store_that_is_too_small_is_named_with_what_it_needs(push, snapshots):
    for given, fits in ((snapshots * SNAPSHOT, True), (snapshots * SNAPSHOT - 1, False)):
        cfg, _, found = host_memory(push, object_store_memory=given)
        problem = found.problem(cfg)
        assert (problem is None) == fits
        assert fits or f"{snapshots} pushes" in (problem or "")

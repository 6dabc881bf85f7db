"""Roles on the GPUs of others, in a Ray that believes in four GPUs."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import ray

from grpo_components.cluster.cluster import Cluster
from grpo_components.cluster.ray_cluster import Need, RayCluster
from grpo_components.cluster.restarts import RestartBudget

COUNTER = "lib.counter_role.Counter"
STORE = 80 * 10**6


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=4))
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # has the role's class; roles inherit it
    (tmp_path / "logs").mkdir()
    options = {"object_store_memory": STORE, "budget": RestartBudget(1, 1e9)}
    cluster = Cluster(tmp_path, "WARNING", 0, note=lambda line: None, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.timeout(120)
def test_a_generator_has_the_gpus_of_its_trainers_and_reserves_none(cluster):
    async def run():
        together = {"num_gpus": 1, "restarts_alone": False}
        trainers = [cluster.spawn(f"trainer_{n}", COUNTER, **together) for n in range(4)]
        generators = [
            cluster.spawn(f"generator_{n}", COUNTER, num_gpus=2, beside=beside)
            for n, beside in enumerate([("trainer_0", "trainer_1"), ("trainer_2", "trainer_3")])
        ]
        await cluster.ready(90)
        gpus = [await role.call("gpus", timeout_s=9) for role in trainers]
        assert sorted(gpus) == ["0", "1", "2", "3"], "all of them, one each"
        shared = [f"{gpus[0]},{gpus[1]}", f"{gpus[2]},{gpus[3]}"]
        assert [await role.call("gpus", timeout_s=9) for role in generators] == shared
        os.kill(generators[1].process.pid, signal.SIGKILL)
        assert await generators[1].call("gpus", timeout_s=60) == shared[1], "also after a restart"

    asyncio.run(run())


@ray.remote
class Placed:
    def where(self):
        return ray.util.get_current_placement_group(), ray.get_gpu_ids()


@pytest.mark.timeout(120)
def test_in_a_joined_cluster_it_is_placed_in_the_bundle_of_its_trainers(cluster, tmp_path):
    need = Need(4, {"GPU": 1}, "PACK", together=2, guests="generator")
    joined = RayCluster(tmp_path, "WARNING", lambda line: None, "auto", None)
    joined.reserve({"trainer": need}, 30)
    names = [*(f"trainer_{n}" for n in range(4)), "generator_0", "generator_1"]
    options = {name: joined.options(name, 0) for name in names}
    bundles = {
        name: given["scheduling_strategy"].placement_group_bundle_index
        for name, given in options.items()
    }
    assert bundles == dict(zip(names, (0, 0, 1, 1, 0, 1), strict=True))
    actors = {name: Placed.options(**given).remote() for name, given in options.items()}
    found = {name: ray.get(actor.where.remote(), timeout=60) for name, actor in actors.items()}
    assert len({group.id for group, _ in found.values()}) == 1
    assert sorted(found[f"trainer_{n}"][1][0] for n in range(4)) == [0, 1, 2, 3]
    assert found["generator_1"][1] == []
    joined.stop(lambda: None)

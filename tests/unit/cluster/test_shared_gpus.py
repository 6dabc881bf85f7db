"""Generators in a joined cluster share the room of their trainers, in a Ray with four GPUs."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import ray
from lib.clusters import new_cluster

from grpo_components.cluster import cluster as cluster_module
from grpo_components.cluster.ray_cluster import Need


@pytest.fixture
def four_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=4))
    cluster = new_cluster(tmp_path, object_store_memory=80 * 10**6)
    try:
        cluster.start()
        yield
    finally:
        cluster.stop()


@ray.remote
class Placed:
    def where(self):
        return ray.util.get_current_placement_group(), ray.get_gpu_ids()


@pytest.mark.timeout(120)
def test_in_a_joined_cluster_it_is_placed_in_the_bundle_of_its_trainers(four_gpus, tmp_path):
    need = Need(4, {"GPU": 1}, "PACK", together=2, guests="generator")
    joined = new_cluster(tmp_path, address="auto").ray
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


@pytest.mark.parametrize(("address", "used"), [("auto", ["gpu 0", "gpu 2"]), (None, ["gpu 0"] * 2)])
def test_a_restarted_generator_uses_the_gpus_of_the_present_trainer_if_its_node_may_be_another(
    tmp_path, monkeypatch, address, used
):
    """On one machine it keeps its GPUs: another generator may use those of the present trainer."""
    hosts = []

    def start_host(*_):
        hosts.append(MagicMock(**{"gpus.remote.return_value": f"gpu {len(hosts)}"}))
        return hosts[-1]

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start_host))
    monkeypatch.setattr(ray, "remote", lambda _: actor)
    placed = SimpleNamespace(scratch=tmp_path, options=lambda *_: {})
    monkeypatch.setattr(cluster_module, "RayCluster", lambda *_: placed)
    cluster = new_cluster(tmp_path, address=address)
    for name, beside in (("trainer_0", ()), ("generator_0", ["trainer_0"])):
        cluster.spawn(name, "a.Role", beside=beside)
    for role in cluster.roles:
        role.start_again()
    assert [call.args[0] for host in hosts for call in host.use_gpus.remote.mock_calls] == used

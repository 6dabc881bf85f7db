"""Reserves room for the roles of a run in a cluster that others use as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from grpo_components.cluster.nodes import this_node
from grpo_components.errors import fail

_NOTE_AFTER_S = 5.0
"""Seconds after which the user is told that the run waits for room."""


@dataclass(frozen=True)
class Need:
    """What the processes of one family of roles, e.g. all trainers, need of a cluster."""

    count: int
    """Number of processes."""
    resources: Mapping[str, float]
    """Ray's resources of one process, which is never split over two nodes."""
    strategy: Literal["PACK", "SPREAD"]
    """PACK: on as few nodes as possible, as they talk to each other. SPREAD: on many nodes."""
    paths: Mapping[str, str]
    """Files and folders that each process reads, by config key."""
    together: int = 1
    """Number of consecutive processes that share a node."""
    guests: str = ""
    """Family whose n-th process runs beside the n-th of these sets, and takes no room itself."""

    def text(self) -> str:
        """Return the need in words."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        return f"{self.count} x {each}"


def family_of(name: str) -> str:
    """Return the family of a role: `trainer` of `trainer_0`."""
    family, _, number = name.rpartition("_")
    return family if number.isdigit() else name


class Placement:
    """Places the roles of a run: those with needs in placement groups, others with the driver."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._needs: Mapping[str, Need] = {}

    def reserve(
        self, needs: Mapping[str, Need], timeout_s: float, note: Callable[[str], None]
    ) -> None:
        """Reserve room for all roles, before the first of them starts."""
        self._needs = needs
        _check_room(needs, _nodes())
        for family, need in needs.items():
            bundle = {name: need.together * amount for name, amount in need.resources.items()}
            bundles = [dict(bundle) for _ in range(need.count // need.together)]
            self._groups[family] = placement_group(bundles, strategy=need.strategy)
        ready = [group.ready() for group in self._groups.values()]
        wanted = ", ".join(f"{family} {need.text()}" for family, need in needs.items())
        try:
            ray.get(ready, timeout=min(_NOTE_AFTER_S, timeout_s))
        except GetTimeoutError:
            note(f"waiting up to {timeout_s:g} s for room in the cluster: {wanted}")
            try:
                ray.get(ready, timeout=timeout_s)
            except GetTimeoutError:
                free = ray.available_resources()
                left = {
                    name: free.get(name, 0) for need in needs.values() for name in need.resources
                }
                found = ", ".join(f"{amount:g} {name}" for name, amount in left.items())
                raise TimeoutError(
                    f"the driver waited {timeout_s:g} s (timeouts.startup_s) for other runs on the "
                    f"Ray cluster to leave room for {wanted}; free now: {found}"
                ) from None

    def why_no_room(self, names: Sequence[str]) -> str:
        """Say why the nodes that live have no room for roles; empty if they have."""
        families = [family_of(name) for name in names]
        wanted = [self._needs[family].resources for family in families if family in self._needs]
        nodes = _nodes()
        if fits(wanted, nodes):
            return ""
        return f"the {len(nodes)} nodes that live have no room for it ({_totals(nodes, wanted)})"

    def nodes(self) -> dict[str, set[str]]:
        """Return the ids of the nodes on which each family's processes will run."""
        return {
            family: set(placement_group_table(group)["bundles_to_node_id"].values())
            for family, group in self._groups.items()
        }

    def options(self, name: str) -> dict[str, Any]:
        """Return Ray's options for the process of a role."""
        family = family_of(name)
        number = int(name.rpartition("_")[2]) if name != family else 0
        host = next((f for f, need in self._needs.items() if need.guests == family), family)
        if host not in self._groups:  # it talks to the driver only, and takes no room
            here = NodeAffinitySchedulingStrategy(this_node(), soft=False)
            return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": here}
        resources: Mapping[str, float] = {}
        if host == family:
            resources = self._needs[family].resources
            number //= self._needs[family].together
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[host], placement_group_bundle_index=number
            ),
        }

    def remove(self) -> None:
        """Give the room back; processes that still run in it are killed."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each node that lives, used or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_room(needs: Mapping[str, Need], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse needs that the nodes could not meet even if nobody else used them."""
    for family, need in needs.items():
        for name, amount in need.resources.items():
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if amount > largest:
                problem = f"one process needs {amount:g} {name}, the cluster's largest node has"
                key = f"gpus_per_{family}" if name == "GPU" else f"cpu_threads.{family}"
                fail(key, f"{problem} {largest:g}", f"at most {largest:g}, or larger nodes")
            if need.together * amount > largest:
                problem = f"{need.together} given, and the cluster's largest node has {largest:g}"
                key = "generator.tensor_parallel_size"
                fail(key, f"{problem} {name}", f"at most {largest / amount:g}, or larger nodes")
    wanted = [
        {name: need.together * amount for name, amount in need.resources.items()}
        for need in needs.values()
        for _ in range(need.count // need.together)
    ]
    if not fits(wanted, nodes):
        counts = ", ".join(f"{family} {need.text()}" for family, need in needs.items())
        problem = f"its {len(nodes)} nodes with {_totals(nodes, wanted)} have no room for {counts}"
        fail("ray.address", problem, "a larger cluster, or fewer roles")


def _totals(nodes: Sequence[Mapping[str, float]], wanted: Sequence[Mapping[str, float]]) -> str:
    names = sorted({name for resources in wanted for name in resources})
    return " and ".join(f"{sum(node.get(n, 0) for node in nodes):g} {n}" for n in names)


def fits(wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return whether processes fit onto nodes, the largest placed first, none split over two."""
    left = [dict(node) for node in nodes]
    for resources in sorted(wanted, key=lambda each: sorted(each.items()), reverse=True):
        for node in left:
            if all(node.get(n, 0) >= amount - 1e-9 for n, amount in resources.items()):
                for n, amount in resources.items():
                    node[n] -= amount
                break
        else:
            return False
    return True

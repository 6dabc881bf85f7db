"""Predicts what pushes of weights take in the memory of a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_components.settings import Settings
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import GIB, RoleMemory, gib

_SNAPSHOTS = 3
"""Snapshots in the object store at most: the newest one, one that a generator still reads, and one
that is being stored."""
_DELTA_SNAPSHOTS = _SNAPSHOTS + 2
"""With delta pushes: the newest one and one that is still read have deltas, of up to their size."""
_RAY_SHARE = 0.3
"""Share of a node's memory that Ray takes for its object store by default."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of a push in the nodes' CPU memory."""

    snapshot: int
    """Bytes of all weights, in the compute dtype."""
    snapshots: int
    """Snapshots in an object store at most, or as many bytes in deltas."""
    object_store: int
    """Bytes in the object store of a node that has generators."""
    trainers: int
    """Bytes of all trainer ranks together, beside their GPUs."""
    generators: int
    """Bytes of all generators together, beside their GPUs."""
    first_rank: int
    """Bytes of the checkpoint, which rank 0 reads whole."""

    @classmethod
    def of(cls, cfg: Settings, sizes: ModelSizes, roles: list[RoleMemory]) -> HostMemory:
        """Return the memory of a run's roles."""
        snapshot = sizes.snapshot_bytes(cfg.dtype)
        snapshots = _DELTA_SNAPSHOTS if cfg.push == "delta" else _SNAPSHOTS

        def host(name: str) -> int:
            return sum(r.count * sum(r.host.values()) for r in roles if r.role == name)

        return cls(
            snapshot,
            snapshots,
            snapshots * snapshot,
            host("trainer"),
            host("generator"),
            sizes.weight_bytes(cfg.dtype),
        )

    def lines(self) -> Iterator[str]:
        """Yield lines of text about it."""
        snapshots = f"{self.snapshots} of them, {gib(self.object_store)} GiB"
        yield (
            f"push: {gib(self.snapshot)} GiB of weights; the object store of each node has up to "
            f"{snapshots} (object_store_memory; Ray takes {_RAY_SHARE:.0%} of the node's memory)"
        )
        yield (
            f"host: {gib(self.trainers)} GiB of all trainers' buffers and copies, and "
            f"{gib(self.first_rank)} GiB in trainer_0 while it reads the checkpoint"
        )
        if self.generators:
            what = "for delta pushes that they rebuild, or for weights while they sleep"
            yield f"host: {gib(self.generators)} GiB of all generators, {what}"

    def problem(self, cfg: Settings) -> str | None:
        """Return what is wrong with `object_store_memory`, if anything is."""
        given = cfg.object_store_memory
        if given is None or given >= self.object_store:
            return None
        problem = f"object_store_memory: {given} given, and {self.snapshots} pushes"
        return f"{problem} take {gib(self.object_store)} GiB; allowed: {self.object_store} or more"


def node_bytes(roles: list[RoleMemory], host: HostMemory) -> int:
    """Return the bytes of everything on a machine without GPUs, for its tensors alone."""
    return sum(role.count * role.total for role in roles) + host.object_store + GIB

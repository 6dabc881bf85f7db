"""Predicts what pushes of weights take in the memory of a node."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_components.settings import Settings
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import RoleMemory, gib

_SNAPSHOTS = 3
"""Snapshots in the object store at most: the newest one, one that a generator still reads, and one
that is being stored."""
_DELTA_SNAPSHOTS = _SNAPSHOTS + 2
"""With delta pushes: the newest one and one that is still read have deltas, of up to their size."""
_RAY_SHARE = 0.3
"""Share of a node's memory that Ray takes for its object store by default."""


class HostMemory:
    """CPU memory of a push, in bytes, of a run's roles."""

    def __init__(self, cfg: Settings, sizes: ModelSizes, roles: list[RoleMemory]) -> None:
        def host(name: str) -> int:
            return sum(r.count * sum(r.host.values()) for r in roles if r.role == name)

        self.snapshot = sizes.snapshot_bytes(cfg.dtype)
        """All weights, in the compute dtype."""
        self.snapshots = _DELTA_SNAPSHOTS if cfg.push == "delta" else _SNAPSHOTS
        """Snapshots in an object store at most, or as many bytes in deltas."""
        self.object_store = self.snapshots * self.snapshot
        """Object store of a node that has generators."""
        self.trainers, self.generators = host("trainer"), host("generator")
        """All trainer ranks together, and all generators together, beside their GPUs."""
        self.first_rank = sizes.weight_bytes(cfg.dtype)
        """The checkpoint, which rank 0 reads whole."""

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

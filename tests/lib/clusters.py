"""Builds clusters for tests, without a recipe."""

from pathlib import Path
from typing import Any

from grpo_components.cluster.cluster import Cluster
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import RaySettings, Settings


def new_cluster(
    folder: Path, note: Any = lambda line: None, address: str | None = None, **keys: Any
) -> Cluster:
    """Return a cluster that is not started; by default, it restarts no role."""
    keys = {"log_level": "WARNING", "max_restarts": 0, "ray": RaySettings(address=address), **keys}
    cfg = Settings.model_construct(output_dir=str(folder), **keys)
    ledger = Ledger(StalenessContract(0, 1), 1, iter(()))
    return Cluster(cfg, ledger, note, lambda line: None)

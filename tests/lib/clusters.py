"""Builds clusters for tests, without a recipe."""

from pathlib import Path
from typing import Any

from grpo_components.cluster.cluster import Cluster
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import RaySettings, Settings


def settings_of(folder: Path, address: str | None = None, **keys: Any) -> Settings:
    """Return the config keys that a cluster in this folder reads; by default nothing restarts."""
    keys = {"log_level": "WARNING", "max_restarts": 0, **keys}
    ray = RaySettings(address=address)
    return Settings.model_construct(output_dir=str(folder), ray=ray, **keys)


def new_cluster(folder: Path, note: Any = lambda line: None, **keys: Any) -> Cluster:
    """Return a cluster that is not started, with an empty ledger."""
    ledger = Ledger(StalenessContract(0, 1), 1, iter(()))
    return Cluster(settings_of(folder, **keys), ledger, note, lambda line: None)

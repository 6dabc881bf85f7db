"""Builds the cluster of a run from its config, and shares the cores out to the roles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_components.cluster.cluster import Cluster
from grpo_components.cluster.restarts import RestartBudget
from grpo_components.exchange.ledger import Ledger
from grpo_components.replay.recorded_run import available_cpus
from grpo_components.settings import Settings, teachers_of


def threads_of(cfg: Settings, role: str, num_references: int) -> int:
    """Return the threads that torch gets in each process of a role."""
    if cfg.ray.address is not None:  # as Ray does: the cores of this machine say nothing there
        return getattr(cfg.cpu_threads, role) or 1
    num_reward_models = int(cfg.reward_model.path is not None)
    num_frozen = num_references + teachers_of(cfg) + num_reward_models
    num_roles = cfg.num_generators + cfg.num_trainers + num_frozen
    share = max(1, available_cpus(cfg.replay_events) // num_roles)
    return getattr(cfg.cpu_threads, role) or share


def build_cluster(
    cfg: Settings,
    ledger: Ledger,
    note: Callable[[str], None],
    phase: Callable[[str], None],
) -> Cluster:
    """Build the cluster from the config."""
    return Cluster(
        Path(cfg.output_dir),
        cfg.log_level,
        ledger.attempt,
        budget=RestartBudget(cfg.max_restarts, cfg.restart_window_s),
        heartbeat_s=cfg.timeouts.heartbeat_s,
        note=note,
        phase=phase,
        events=ledger.events,
        address=cfg.ray.address,
        object_store_memory=cfg.object_store_memory,
    )

"""Calls functions on given nodes of a Ray cluster, and waits for their answers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_components.cluster import node_side

_LOG = logging.getLogger("cluster")


def this_node() -> str:
    """Return the id of the node on which this process runs."""
    return ray.get_runtime_context().get_node_id()


def on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function on a node; return the reference to its result."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _task(function).options(scheduling_strategy=there).remote(*args)


@functools.cache  # Ray exports a function each time that it becomes a task
def _task(function: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(function)


def send_signal(node_id: str, pid: int, number: int) -> None:
    """Send a signal to a process of another node, without waiting."""
    try:
        on_node(node_id, node_side.signal_process, pid, number)
    except RayError as error:  # the node, or Ray itself, has gone
        _LOG.info("no signal to process %d of node %s: %s", pid, node_id, error)


def answers(
    references: Mapping[str, Any], what: str, timeout_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Wait for the answers of nodes."""
    ready, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s)
    found, problems = dict[str, Any](), dict[str, str]()
    for node, reference in references.items():
        if reference not in ready:
            problems[node] = f"did not {what} within {timeout_s:g} s"
            continue
        try:
            found[node] = ray.get(reference, timeout=timeout_s)
        except (RayError, GetTimeoutError) as error:
            problems[node] = f"could not {what}: {' '.join(str(error).split())}"
    return found, problems

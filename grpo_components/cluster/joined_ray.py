"""A Ray cluster that the run joins, and shares with others."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from grpo_components.cluster import node_side
from grpo_components.cluster.nodes import answers, on_node, this_node
from grpo_components.cluster.own_ray import logging_level
from grpo_components.cluster.placement import Need, Placement
from grpo_components.cluster.remote_files import RemoteFiles
from grpo_components.errors import fail
from grpo_components.user_code import PACKAGE, user_modules

_CHECK_S = 120.0
"""Longest wait for a node's answer before the start; it may have to unpack the code first."""
_CONNECT_S = 10.0
"""Longest wait for a connection to a cluster's head, in seconds."""
_END_S = 30.0
"""Longest wait for a node to end the run's processes and remove its files."""


class JoinedRay:
    """Starts the roles of a run in a cluster that is there, and leaves nothing behind in it."""

    def __init__(
        self, address: str, output_dir: Path, log_level: str, note: Callable[[str], None]
    ) -> None:
        self._address, self._output_dir = address, output_dir.absolute()
        self._log_level, self._note = log_level, note
        self.name = node_side.SCRATCH_PREFIX + secrets.token_hex(6)
        self.scratch = Path("/tmp") / self.name
        """Folder for temporary files of the run, on every node."""
        self.marker = f".{self.name}"
        """File in the run's folder by which a node sees that it shares the folder."""
        self.files = RemoteFiles(self._output_dir, self.scratch)
        self._placement, self._hosts = Placement(), dict[str, str]()

    def start(self) -> None:
        """Join the cluster."""
        _join(self._address, self._log_level)
        (self._output_dir / self.marker).touch()

    def reserve(self, needs: Mapping[str, Need], timeout_s: float) -> None:
        """Reserve room for all roles, and check the nodes that they will run on."""
        self._placement.reserve(needs, timeout_s, self._note)
        paths: dict[str, dict[str, str]] = {this_node(): {}}
        for family, nodes in self._placement.nodes().items():
            for node in nodes:
                paths.setdefault(node, {}).update(needs[family].paths)
        paths[this_node()] = {key: path for each in paths.values() for key, path in each.items()}
        asked = {
            node: on_node(
                node,
                node_side.describe,
                str(self._output_dir),
                self.marker,
                needed,
                node == this_node(),
            )
            for node, needed in paths.items()
        }
        found, problems = answers(asked, "answer", _CHECK_S)
        for node, problem in problems.items():
            fail("ray.address", f"node {_address(node)} {problem}", "a cluster of working nodes")
        own = found[this_node()]
        for node, facts in found.items():
            self._hosts[node] = f"{facts['host']} ({_address(node)})"
            _check_node(self._hosts[node], facts, own, paths[node], self._output_dir)
        nodes = ", ".join(
            f"{', '.join(sorted(families))} on {self._hosts[node]}"
            for node, families in _by_node(self._placement.nodes()).items()
        )
        self._note(f"joined the Ray cluster at {self._address}: {nodes}")
        for node, facts in found.items():
            if not facts["shares"]:
                self._note(
                    f"{self._hosts[node]} does not see {self._output_dir}: its files come through "
                    "Ray"
                )
                self.files.add_node(node)

    def why_no_room(self, names: Sequence[str]) -> str:
        """Say why the nodes that live have no room for roles; empty if they have."""
        return self._placement.why_no_room(names)

    def options(self, name: str, num_gpus: float) -> dict[str, Any]:
        """Return Ray's options for the process of a role; its GPUs are reserved."""
        variables = {node_side.RUN_VARIABLE: self.name}
        return {**self._placement.options(name), "runtime_env": {"env_vars": variables}}

    def stop(self, kill_roles: Callable[[], None]) -> None:
        """End the run's processes on every node, bring their last files and remove the rest."""
        try:
            if ray.is_initialized():
                kill_roles()
                self._clear_nodes()
                self._placement.remove()
        finally:
            with contextlib.suppress(RayError):
                ray.shutdown()
            (self._output_dir / self.marker).unlink(missing_ok=True)

    def _clear_nodes(self) -> None:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        nodes = [node for node in self._hosts if node in alive]
        ending = {node: on_node(node, node_side.end_processes, self.name) for node in nodes}
        _, unreachable = answers(ending, "end the run's processes", _END_S)
        self.files.bring_last(_END_S)
        folder, scratch = str(self._output_dir), str(self.scratch)
        clearing = {
            node: on_node(node, node_side.clear, folder, scratch)
            for node in nodes
            if node not in unreachable
        }
        _, left = answers(clearing, "remove the run's files", _END_S)
        for node, problem in (unreachable | left).items():
            self._note(f"{self._hosts[node]} {problem}")


def _join(address: str, log_level: str) -> None:
    """Join a Ray cluster, and send it this package and the user's modules."""
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # `exit_code` shows each failure once
    allowed = "null for a Ray of the run's own, or a cluster of which this machine is a node"
    try:
        if address != "auto":  # Ray itself would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        with ThreadPoolExecutor(1) as thread:  # Ray leaves SIGTERM to the main thread
            thread.submit(
                ray.init,
                address=address,
                log_to_driver=False,
                logging_level=logging_level(log_level),
                runtime_env={"py_modules": [str(PACKAGE), *_users_packages()]},
            ).result()
    # Ray has no common class for: no cluster there, another version, no or a wrong token.
    except (RayError, OSError, RuntimeError, ValueError, AssertionError) as error:
        fail("ray.address", f"{address} given, and it cannot be joined: {error}", allowed)


def _users_packages() -> list[str]:
    """Return the files and packages that the roles may import of the user's code."""
    found: dict[str, None] = {}
    for name, path in user_modules(None).items():
        depth = len(Path(name).parts) - 1
        found[str(path.parents[depth - 1] if depth else path)] = None
    return list(found)


def _address(node_id: str) -> str:
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)


def _by_node(families: Mapping[str, set[str]]) -> dict[str, set[str]]:
    nodes: dict[str, set[str]] = {}
    for family, ids in families.items():
        for node in ids:
            nodes.setdefault(node, set()).add(family)
    return nodes


def _check_node(
    host: str,
    facts: Mapping[str, Any],
    own: Mapping[str, Any],
    paths: Mapping[str, str],
    folder: Path,
) -> None:
    """Compare a node with the driver's."""
    for name, version in own["versions"].items():
        given = facts["versions"].get(name)
        if given != version:
            problem = f"{host} has {name} {given or 'not at all'}, the driver's node has {version}"
            fail("ray.address", problem, "nodes with the same packages")
    if facts["other"]:
        problem = f"{host} has a folder {folder} that is not this run's"
        fail("output_dir", problem, "a shared folder, or one that is not on that node")
    for key, path in paths.items():
        content = facts["contents"][key]
        if content != own["contents"][key]:
            problem = f"{host} has no {path}" if content is None else f"{host} has another {path}"
            fail(key, problem, "a path with the same files on every node")

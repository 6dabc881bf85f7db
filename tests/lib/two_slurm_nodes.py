"""A Slurm cluster of two machines on one: slurmctld on the first, slurmd on both."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lib.machines import TwoMachines
from lib.machines import why_not as why_no_machines

SHARED = Path("/tmp/shared")
"""Folder that both machines see."""
# A requeued job waits until its first credential has expired: 120 s unless AuthInfo says less.
CONFIG = """
ClusterName=two
SlurmctldHost=node-a(10.77.0.1)
SlurmUser=root
AuthInfo=socket=/tmp/shared/munge.socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/tmp/shared/slurmctld.log
SlurmdLogFile=/tmp/shared/slurmd-%n.log
ReturnToService=2
NodeName=node-a NodeAddr=10.77.0.1 CPUs=16 RealMemory=4000
NodeName=node-b NodeAddr=10.77.0.2 CPUs=16 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES
"""


def why_not() -> str:
    """Say why Slurm cannot be started here; empty if it can."""
    if missing := [each for each in ("slurmctld", "slurmd", "munged") if not shutil.which(each)]:
        return f"{', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
    return why_no_machines()


class SlurmNodes:
    """Two nodes; daemons end with their machines."""

    def __init__(self, shared: Path, visible: dict[Path, Path]) -> None:
        two = TwoMachines({shared: SHARED, **visible}, (1, 1))
        self.nodes = (two.a, two.b)
        self.close = two.close
        (shared / "slurm.conf").write_text(CONFIG)
        (shared / "munge.key").write_bytes(os.urandom(128))
        (shared / "munge.key").chmod(0o400)
        try:
            self._start_daemons()
        except BaseException:
            self.close()
            raise

    def _start_daemons(self) -> None:
        for node in self.nodes:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # the job makes its own
                node.environment.pop(name, None)
            node.environment["SLURM_CONF"] = f"{SHARED}/slurm.conf"
        files = {"key-file": "shared/munge.key", "socket": "shared/munge.socket"}
        files |= {f"{kind}-file": f"munge.{kind}" for kind in ("pid", "log", "seed")}
        first = self.nodes[0]
        first.run("munged", "--force", *(f"--{name}=/tmp/{file}" for name, file in files.items()))
        first.run("mkdir", "/tmp/slurmctld")
        first.run("slurmctld", "-c")
        for node in self.nodes:
            node.run("slurmd", "-N", node.name)

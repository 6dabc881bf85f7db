"""Makes two machines of one: each has its own network, mounts, processes, name and Ray node."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
INIT = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    try:
        os.wait()
    except ChildProcessError:
        signal.sigwait([signal.SIGCHLD])
"""
"""Process 1 of a machine: takes over orphans, and reaps them. Killing it kills all others."""
PORT = 6390
_OWN_SET_UP = (
    *("mount -t tmpfs x /tmp", "hostname x", "ip link add br0 type bridge"),
    "ip link add name end0 type veth peer name end1",
)
"""What every machine does to itself."""


def why_not() -> str:
    """Say why machines cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]:
        return f"{', '.join(missing)} not found"
    unshare = ("unshare", "-mnpu", "--propagation", "private", "--kill-child")
    command = [*unshare, "sh", "-ec", " && ".join(_OWN_SET_UP)]
    tried = subprocess.run(command, capture_output=True, text=True)
    return tried.stderr.strip() or "no namespaces" if tried.returncode else ""


def run(*command: str | Path) -> None:
    subprocess.run([str(each) for each in command], check=True, timeout=60)


class Machine:
    def __init__(
        self,
        name: str,
        address: str,
        work: Path,
        visible: dict[Path, Path],
        environment: dict[str, str],
    ) -> None:
        self.name, self.address, self.environment = name, address, environment
        own = work / name
        own.mkdir()
        mounts = [f"mount -t tmpfs own {own}", "mount -t tmpfs -o size=2g shm /dev/shm"]
        own_code = {path: path for path in (ROOT, Path(sys.prefix))}
        for source, target in (own_code | visible).items():
            if not target.is_relative_to("/tmp"):
                continue  # seen as it is
            inside = own / target.relative_to("/tmp")
            mounts += [f"mkdir -p {inside}", f"mount --bind {source} {inside}"]
        mounts += [f"mount --rbind {own} /tmp", f"hostname {name}", "ip link set lo up"]
        script = " && ".join([*mounts, f'exec {sys.executable} -c "$0"'])
        unshare = ("unshare", "-mnpu", "--propagation", "private", "--kill-child", "--mount-proc")
        self._unshare = subprocess.Popen([*unshare, "sh", "-ec", script, INIT])
        self.pid = self._wait_for_init()

    def _wait_for_init(self) -> int:
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in children.read_text().split():
                    if "os.wait" in Path(f"/proc/{pid}/cmdline").read_text():
                        return int(pid)
            assert self._unshare.poll() is None, f"machine {self.name} did not start"
            time.sleep(0.05)
        raise TimeoutError(f"machine {self.name} did not start within 20 s")

    def command(self, *command: str | Path) -> list[str]:
        """Return the command that runs another one on this machine."""
        return ["nsenter", "-t", f"{self.pid}", "-m", "-n", "-p", "-u", *map(str, command)]

    def run(self, *command: str | Path, timeout_s: float = 120) -> str:
        options = {"env": self.environment, "capture_output": True, "text": True}
        done = subprocess.run(self.command(*command), timeout=timeout_s, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str | Path, **options) -> subprocess.Popen:
        return subprocess.Popen(self.command(*command), env=self.environment, **options)

    def start_ray(self, *options: str) -> None:
        size = ("--object-store-memory", "400000000", "--disable-usage-stats")
        self.run(BIN / "ray", "start", "--node-ip-address", self.address, *size, *options)

    def processes(self) -> dict[int, str]:
        """Return the command lines of the processes on this machine, less its process 1."""
        listed = self.run("ps", "-eo", "pid,stat,args", "--no-headers").splitlines()
        rows = [line.split(None, 2) for line in listed]
        return {int(pid): args for pid, stat, args in rows if pid != "1" and "Z" not in stat}

    def path(self, inside: str | Path) -> Path:
        """Return the path under which this process finds a file of the machine."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def kill(self) -> None:
        self._unshare.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self._unshare.wait()


class TwoMachines:
    """Two connected machines; the first one is the head of a Ray cluster."""

    def __init__(self, visible: dict[Path, Path], cpus: tuple[int, int]) -> None:
        self._work = Path(tempfile.mkdtemp(prefix="two-"))
        os.chmod(self._work, 0o755)
        token = secrets.token_hex(32)
        kept = ("PATH", "HOME", "LANG", "PYTHONPATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment["PATH"] = f"{BIN}:{environment['PATH']}"
        self.a = Machine("node-a", "10.77.0.1", self._work, visible, environment)
        self.b = Machine("node-b", "10.77.0.2", self._work, visible, environment)
        cable = f"v{secrets.token_hex(3)}"
        run("ip", "link", "add", f"{cable}a", "type", "veth", "peer", "name", f"{cable}b")
        for machine, end in ((self.a, f"{cable}a"), (self.b, f"{cable}b")):
            run("ip", "link", "set", end, "netns", str(machine.pid))
            machine.run("ip", "link", "set", end, "name", "eth0")
            # The address is the bridge's: the cable goes when the other machine is killed.
            machine.run("ip", "link", "add", "br0", "type", "bridge")
            machine.run("ip", "link", "set", "eth0", "master", "br0")
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", "br0")
            machine.run("ip", "link", "set", "eth0", "up")
            machine.run("ip", "link", "set", "br0", "up")
        self.cpus = cpus

    def start_ray(self) -> None:
        head = ("--head", "--port", str(PORT), "--include-dashboard=false")
        self.a.start_ray(*head, "--num-cpus", str(self.cpus[0]))
        self.b.start_ray("--address", f"{self.a.address}:{PORT}", "--num-cpus", str(self.cpus[1]))

    def link(self, state: str) -> None:
        self.b.run("ip", "link", "set", "eth0", state)

    def close(self) -> None:
        for machine in (self.a, self.b):
            machine.kill()
        shutil.rmtree(self._work, ignore_errors=True)

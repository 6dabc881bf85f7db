"""The parent of the roles, asked by the real launcher, with a program in place of Ray's worker."""

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from grpo_components.cluster import setup_worker
from grpo_components.cluster.role_parent import RoleParent
from grpo_components.cluster.role_parents import RoleParents

WORKER = """
import json, os, random, signal, sys, tempfile
import numpy
sys.stdout.write(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "pid": os.getpid(), "parent": os.getppid(),
    "tmp": tempfile.gettempdir(), "given": os.environ.get("GIVEN"),
    "only_parent": os.environ.get("ONLY_PARENT"),
    "threads": len(os.listdir("/proc/self/task")), "session": os.getsid(0),
    "name": __name__, "imported": "grpo_components.cluster.role_host" in sys.modules,
    "random": [random.random(), float(numpy.random.rand())],
    "handlers": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGCHLD, signal.SIGTERM)],
    "open": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n > "2"
                   and os.path.exists(f"/proc/self/fd/{n}")),
}))
sys.stdout.flush()
sys.stderr.write("to stderr")
if "waits" in sys.argv:
    signal.pause()
"""
DRIVER = """
import signal, sys
from pathlib import Path
from grpo_components.cluster.role_parent import RoleParent
folder = Path(sys.argv[1])
sys.stdout.write(f"{RoleParent(folder, 'parent', folder / 'log', {}).pid}\\n")
sys.stdout.flush()
signal.pause()
"""
WAIT_S = 120
SAME = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture
def folder(tmp_path):
    """A folder with a worker, and with Ray's own file, which says that it ran."""
    (tmp_path / "default_worker.py").write_text(WORKER)
    (tmp_path / "setup_worker.py").write_text("import sys; sys.stdout.write('its own')")
    (tmp_path / "work").mkdir()
    return tmp_path


@pytest.fixture
def parent(folder):
    parent = RoleParent(folder, "parent", folder / "log", SAME | {"ONLY_PARENT": "1"})
    yield parent
    parent.stop()
    assert not psutil.pid_exists(parent.pid)


def launch(folder, address, *arguments, variables=None, out=subprocess.PIPE):
    """Run the launcher as the raylet does; with pipes, this waits for the worker to end."""
    context = {"env_vars": {setup_worker.SOCKET_VARIABLE: address, **(variables or {})}}
    options = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, setup_worker.__file__, folder / "default_worker.py", *arguments, *options],
        stdout=out,
        stderr=out,
        text=True,
        cwd=folder / "work",
        env=environment | SAME,
        timeout=WAIT_S,
        check=True,
    )


def test_a_forked_worker_is_what_the_raylet_would_have_started(folder, parent):
    one, two = (
        launch(folder, parent.address, "--x=1", variables={"GIVEN": given}) for given in "ab"
    )
    assert one.stderr == "to stderr"
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first["argv"] == [str(folder / "default_worker.py"), "--x=1"]
    assert first["cwd"] == str(folder / "work") and first["name"] == "__main__"
    assert (first["given"], second["given"]) == ("a", "b")
    assert first["only_parent"] is None
    given = launch(folder, parent.address, variables={"TMPDIR": str(folder / "work")})
    assert json.loads(given.stdout)["tmp"] == str(folder / "work")
    assert first["parent"] == second["parent"] == parent.pid
    assert first["session"] == first["pid"]
    assert first["imported"] and all(first["handlers"])
    assert first["threads"] == 1
    assert not [name for name in first["open"] if "socket" in name]
    assert first["random"][0] != second["random"][0] and first["random"][1] != second["random"][1]


def test_a_parent_of_all_our_roles_has_one_thread_and_keeps_no_zombie(folder):
    """Else it would refuse to fork: other threads' locks stay locked in a fork."""
    parent = RoleParent(folder, "early", folder / "log", SAME, ("torch", "torchtune", "torchrl"))
    roles = ("training.trainer", "rollout.generator", "exchange.parameter_server")
    for role in roles:
        module = f"grpo_components.{role}"
        answer = launch(folder, parent.address, variables={setup_worker.MODULE_VARIABLE: module})
        assert json.loads(answer.stdout)["parent"] == parent.pid, (folder / "log").read_text()
    assert psutil.Process(parent.pid).num_threads() == 1
    assert not psutil.wait_procs(psutil.Process(parent.pid).children(), WAIT_S)[1]
    parent.stop()
    assert not psutil.pid_exists(parent.pid)


def test_a_worker_that_cannot_be_forked_imports_by_itself_and_says_why(folder, parent):
    """The errors of its role are then those of its own process."""
    launch(folder, parent.address, variables={"RAY_JOB_ID": "1"})
    module = {setup_worker.MODULE_VARIABLE: "grpo_components.no_such_module"}
    for variables, why in [(module, "no_such_module"), ({"RAY_JOB_ID": "2"}, "RAY_JOB_ID")]:
        done = launch(folder, parent.address, variables=variables)
        assert done.stdout == "its own" and why in done.stderr
    done = launch(folder, str(folder / "nowhere"))
    assert done.stdout == "its own" and "nowhere" in done.stderr
    assert (
        json.loads(launch(folder, parent.address, variables={"RAY_JOB_ID": "1"}).stdout)["parent"]
        == parent.pid
    )


def test_a_launcher_that_has_ended_gets_no_worker(folder, parent):
    """Ray kills one that takes too long, and starts another."""
    for whole in (True, False):
        with socket.socket(socket.AF_UNIX) as launcher, (folder / "out").open("w") as out:
            launcher.connect(parent.address)
            request = {"argv": [], "env": SAME, "cwd": "/", "max_files": [9, 9], "oom_score": ""}
            body = json.dumps(request).encode()
            socket.send_fds(launcher, [len(body).to_bytes(8, "big")], [out.fileno()] * 3)
            launcher.sendall(body if whole else body[:5])
    answer = json.loads(launch(folder, parent.address).stdout)  # those before are done with
    assert answer["parent"] == parent.pid
    assert not psutil.wait_procs(psutil.Process(parent.pid).children(), WAIT_S)[1]
    assert (folder / "log").read_text().count("forked") == 1
    open_files = psutil.Process(parent.pid).open_files()
    assert str(folder / "out") not in [each.path for each in open_files]


def test_roles_go_on_without_their_parent_and_import_by_themselves(folder):
    notes = []
    parents = RoleParents(folder, folder / "log", notes.append)
    role = ("grpo_components.exchange.parameter_server.VLLMParameterServer", SAME)
    given = parents.variables(*role)
    address = given.pop(setup_worker.SOCKET_VARIABLE)
    assert given == {setup_worker.MODULE_VARIABLE: "grpo_components.exchange.parameter_server"}
    of_user = parents.variables("my_roles.Mine", SAME)
    assert of_user == {setup_worker.SOCKET_VARIABLE: address}  # its module is not imported early
    other = parents.variables(role[0], SAME | {"OMP_NUM_THREADS": "2"})
    assert other[setup_worker.SOCKET_VARIABLE] != address
    assert parents.variables(*role, num_gpus=0.5) == {}  # a fork does not survive CUDA
    with (folder / "out").open("w") as out:
        launch(folder, address, "waits", out=out)
    parent, _ = sorted(psutil.Process().children(), key=lambda each: each.create_time())[-2:]
    (worker,) = parent.children()
    parent.kill()
    parent.wait(WAIT_S)
    assert worker.is_running()
    assert not notes
    for _ in range(2):
        assert parents.variables(*role) == {}
    (note,) = notes
    assert str(folder / "log") in note
    assert launch(folder, address).stdout == "its own"
    worker.kill()
    parents.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_parent_ends_with_the_driver(folder, how):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, folder], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    parent = psutil.Process(int(driver.stdout.readline()))
    driver.send_signal(how)
    driver.wait(WAIT_S)
    psutil.wait_procs([parent], WAIT_S)
    assert not parent.is_running()

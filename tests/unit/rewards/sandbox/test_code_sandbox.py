"""What programs in the sandbox can do, and that they can do nothing else."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox, Limits

REPOSITORY = Path(__file__).parents[3]
WAIT_S = 60


@pytest.fixture(scope="module")
def sandbox():
    return CodeSandbox(Limits(cpu_s=1, wall_s=20, memory_mib=256, file_mib=1, threads=4))


@pytest.fixture
def nothing_left():
    """Each test must leave no process behind."""
    before = set(psutil.Process().children(recursive=True))
    yield
    new = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(new, timeout=WAIT_S)[1]


def test_a_program_reads_writes_and_has_the_standard_library(sandbox):
    program = """
import collections, decimal, fractions, heapq, json, math, re, sys, tempfile, threading
with tempfile.TemporaryFile() as file:
    file.write(b"kept")
thread = threading.Thread(target=print, args=(input()[::-1],))
thread.start()
thread.join()
print("done", file=sys.stderr)
sys.exit(3)
"""
    outcome = sandbox.run(program, "olleh\n")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (3, "hello\n", "done\n")
    assert not outcome.timed_out


def test_runs_in_one_sandbox_leave_nothing_to_each_other(sandbox):
    program = """
import builtins, os, sys, threading
is_left = os.listdir("/tmp") or hasattr(builtins, "left")
print(input(), open("/dev/stdin").read(), is_left, flush=True)
builtins.left = sys.modules["left"] = 1
os.makedirs("/tmp/left/deep")
os.chmod("/tmp/left", 0)
out = open("/tmp/out", "w")  # noqa: SIM115
sys.stdout = open(1, "w", closefd=False)  # written when Python ends
sys.stdout.write("end")
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    given = ["a long line", "b", ""]
    with sandbox.opened(program) as run:
        outcomes = [run(f"{text}\n") for text in given]
        ended = [run("")]  # no line to read
    assert [outcome.stdout for outcome in outcomes] == [f"{t} {t}\n False\nend" for t in given]
    assert [(outcome.status, outcome.stderr) for outcome in outcomes] == [(0, "")] * 3
    assert ended[0].status == 1 and ended[0].stderr.startswith("Traceback") and not ended[0].stdout


@pytest.mark.parametrize(
    ("program", "status", "stdout"),
    [
        ("print(1)\nimport sys\nsys.stdout.close()", 0, "1\n"),
        ("print(1)\nimport sys\nsys.stdout = None", 0, "1\n"),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint(1)", 0, "1\n"),
        ("f = open(1, 'w')\nf.write('1')", 0, "1"),
        ("import atexit, sys\natexit.register(print, 2)\nprint(1)\nsys.exit(3)", 3, "1\n2\n"),
        ("import atexit\natexit.register(print, 2)\nprint(1)\n1/0", 1, "1\n2\n"),
        ("import threading, time\nprint(1)\n"
         "threading.Thread(target=lambda: print(time.sleep(0.3))).start()", 0, "1\nNone\n"),
        ("import os\nprint(1)\nos.close(1)", 120, ""),
    ],
)  # fmt: skip
def test_a_program_ends_as_a_script_of_python(sandbox, program, status, stdout):
    usual = subprocess.run([sys.executable, "-c", program], env={}, capture_output=True, text=True)
    assert (usual.returncode, usual.stdout) == (status, stdout)
    outcome = sandbox.run(program)
    assert (outcome.status, outcome.stdout) == (status, stdout)


def test_a_run_that_dies_does_not_end_those_after_it(sandbox, nothing_left):
    program = "import os\nn = int(input())\nif n: os.kill(os.getpid(), n)"
    with sandbox.opened(program) as run:
        assert [run(f"{n}").status for n in (0, 9, 0, 15, 0)] == [0, 137, 0, 143, 0]


def test_nothing_of_the_user_the_project_or_the_machine_is_there(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "known")
    secret = tmp_path / "secret"
    secret.write_text("known")
    places = [secret, Path.home() / ".bashrc", REPOSITORY, __file__, os.getcwd(), "/etc/passwd"]
    places += ["/proc/self/environ", "/proc/1/environ", "/proc", "/sys", "/var", "/run", "/home"]
    places += ["/bin/sh", "/usr/bin", "/dev/shm", "/dev/tty", "/dev/sda", "/main.py/.."]
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]  # then the sandbox's is high
    outcome = sandbox.run(f"""
import os, sys, importlib.util
assert os.uname().nodename == "sandbox"
assert set(os.environ) <= {{"HOME", "LANG", "PYTHONHASHSEED", "LC_CTYPE"}}, os.environ
print(*[p for p in {[str(place) for place in places]} if os.path.exists(p)])
names = ("grpo_components", "numpy", "torch", "pip")
print(*[name for name in names if importlib.util.find_spec(name)])
print([fd for fd in range(3, 200) if os.path.exists(f"/dev/fd/{{fd}}")])
for fd in range(3, 200):
    try:
        os.fstat(fd)
    except OSError:
        continue
    print("open:", fd)
""")
    for fd in many:
        os.close(fd)
    assert outcome.stderr == ""
    assert outcome.stdout.split() == ["[]"]


REFUSED = {
    "fork": "while True: os.fork()",
    "processes": "__import__('subprocess').run(['/usr/bin/true'])",
    "spawn": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "clone": "raw(56, 17, 0, 0, 0, 0)",
    "clone3": "raw(435, ctypes.create_string_buffer(88), 88)",
    "vfork": "raw(58)",
    "user namespace": "libc_call('unshare', 0x10000000)",
    "mount": "libc_call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "chroot": "os.chroot('/tmp')",
    "become root": "os.setresuid(0, 0, 0)",
    "socket": "__import__('socket').socket()",
    "unix socket": "__import__('socket').socket(1)",
    "trace": "libc_call('ptrace', 16, 1, 0, 0)",
    "other's memory": "raw(310, 1, 0, 0, 0, 0, 0)",
    "uncounted memory": "os.memfd_create('x')",
    "shared memory": "libc_call('shmget', 0, 1 << 20, 0o1600)",
    "io_uring": "raw(425, 8, ctypes.create_string_buffer(120))",
    "message with descriptors": "pair()[0].sendmsg([b'x'], [(1, 1, b'\\0' * 4)])",
    "messages": "raw(307, pair()[0].fileno(), None, 0, 0)",
    "receive a message": "pair()[0].recvmsg(1)",
    "receive messages": "raw(299, pair()[0].fileno(), None, 0, 64, None)",
    "other's descriptor": "raw(438, 0, 0, 0)",
    "handle of a process": "os.pidfd_open(1)",
    "signal by handle": "raw(424, 0, 0, None, 0)",
    "write other's memory": "raw(311, 1, 0, 0, 0, 0, 0)",
    "advise other's memory": "raw(440, 0, None, 0, 0, 0)",
    "asynchronous I/O": "raw(206, 1, ctypes.byref(ctypes.c_long()))",
    "give pages to a pipe": "raw(278, os.pipe()[1], None, 0, 0)",
    "system call of tomorrow": "raw(500)",
    "remove a device": "os.remove('/dev/urandom')",
    "kernel keys": "raw(248, b'user', b'x', b'y', 1, -3)",
    "write its source": "open('/main.py', 'w')",
    "write beside it": "open('/new', 'w')",
    "write the library": "open(os.__file__, 'w')",
}
"""Attempts that fail at once with an OSError and change nothing, so that one program makes all."""

EXHAUSTING = {
    "full disk": "[open(f'/tmp/{i}', 'wb').write(bytes(2**18)) for i in range(8)]",
    "big file": "open('/tmp/x', 'wb').write(bytes(2**21))",
    "many files": "[open(f'/tmp/{i}', 'w').close() for i in range(5000)]",
    "many open": "open_files = [open('/main.py') for _ in range(100)]",
    "raise limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "memory": "bytearray(2**30)",
    "slow memory": "data = []\nwhile True: data.append(bytearray(2**20))",
    "threads": "for _ in range(9): threading.Thread(target=threading.Event().wait, args=(9,), "
    "daemon=True).start()",
    "flood": "while True: sys.stdout.write('x' * 10_000)",
    "flood of errors": "while True: sys.stderr.write('x' * 10_000)",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "abort": "os.abort()",
    "kill itself": "os.kill(os.getpid(), 9)",
}

HELPERS = """
import ctypes, os, resource, sys, threading
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
def libc_call(name, *args):
    checked(getattr(ctypes.CDLL(None, use_errno=True), name)(*args))
def raw(*args):
    checked(ctypes.CDLL(None, use_errno=True).syscall(*args))
def pair():
    return __import__('socket').socketpair()
"""


def test_system_calls_and_writes_that_leave_the_sandbox_are_refused(sandbox, nothing_left):
    attempts = f"""{HELPERS}
for name, attempt in {REFUSED!r}.items():
    try:
        exec(attempt, dict(globals()))
    except OSError as error:
        print(name, "refused" if error.errno else error, sep=": ")
    else:
        print(name, "got through", sep=": ")
"""
    outcome = sandbox.run(attempts)
    assert outcome.stdout.splitlines() == [f"{name}: refused" for name in REFUSED], outcome.stderr


@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_program_that_exhausts_a_limit_fails(sandbox, nothing_left, name):
    outcome = sandbox.run(HELPERS + EXHAUSTING[name])
    assert outcome.status != 0
    reasons = ("[Errno ", "MemoryError", "start new thread", "maximum limit")
    assert outcome.status >= 120 or any(reason in outcome.stderr for reason in reasons), outcome
    assert len(outcome.stdout) <= 2**20 and len(outcome.stderr) <= 2**20


def test_the_cpu_limit_counts_all_threads_and_cannot_be_ignored(sandbox, nothing_left):
    threads = "import threading\n"
    threads += "for _ in range(2): threading.Thread(target=lambda: sum(iter(int, 1))).start()"
    deaf = (
        "import os, signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nos.close(0); os.close(1); os.close(2)\n"
        "while True: pass"
    )
    for program in (threads, deaf):
        outcome = sandbox.run(program)
        assert outcome.status >= 128 and outcome.timed_out
    assert not sandbox.run("import os\nos.kill(os.getpid(), 9)").timed_out


def test_endless_waiting_ends(sandbox, nothing_left):
    sleep = "import os, time\nos.setsid()\nwhile True: time.sleep(1)"
    outcome = sandbox.run(sleep, wall_s=1)
    assert outcome.timed_out and outcome.status == 128 + 9
    assert sandbox.run("print(1)").stdout == "1\n"


SIGNALS = """
import os, signal
targets = [(os.kill, 0), (os.kill, -1), (os.kill, 1), (os.kill, os.getppid()), (os.killpg, 0)]
targets += [(os.killpg, os.getpgid(os.getppid())), (os.killpg, os.getsid(0))]
for send, target in targets:
    try:
        send(target, NUMBER)
    except (OSError, ValueError):
        pass
"""
RUN = """
import sys
from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox, Limits
outcome = CodeSandbox(Limits(wall_s=60)).run(sys.stdin.read(), wall_s=float(sys.argv[1]))
print(outcome.status, outcome.timed_out)
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
NEW_USER = ["unshare", "--user", "--map-root-user"]


def run_as(user: str, script: str, program: str, wall_s: float = 60) -> str:
    """Output of a script that runs a program in one of the sandbox's two modes."""
    start = [sys.executable, "-c", script, str(wall_s)]
    done = subprocess.run(
        start if user == "root" else [*NEW_USER, *start],
        **{"env": ENVIRONMENT, "input": program, "timeout": WAIT_S},
        **{"capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("user", ["root", "ordinary"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_program_stops_or_ends_nobody_but_itself(user, number):
    """If it could stop its supervisor, its wall-clock limit would not work."""
    stops = number == signal.SIGSTOP  # a stopped program ends at its limit, a killed one at once
    program = SIGNALS.replace("NUMBER", str(int(number)))
    assert run_as(user, RUN, program, wall_s=1 if stops else 60) == f"137 {stops}\n"


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_a_program_cannot_change_a_device(user):
    # Each change sets the present value: harmless if it gets through.
    program = """
import os
for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
    was = os.stat(path)
    mode, times = was.st_mode & 0o7777, (was.st_atime_ns, was.st_mtime_ns)
    for change in (lambda: os.chmod(path, mode), lambda: os.utime(path, ns=times),
                   lambda: os.chown(path, -1, -1),
                   lambda: os.fchmod(os.open(path, os.O_WRONLY), mode)):
        try:
            change()
        except OSError:
            continue
        print("changed", path)
with open("/dev/null", "w") as null:
    null.write("x")
with open("/dev/zero", "rb") as zero:
    assert zero.read(2) == bytes(2)
assert len(os.urandom(8)) == 8
"""
    script = RUN.replace("outcome.timed_out", "outcome.stdout, outcome.stderr")
    assert run_as(user, script, program).split() == ["0"]


def test_a_machine_without_namespaces_is_refused_and_runs_no_program():
    none = "echo 0 > /proc/sys/user/max_user_namespaces"
    command = f"{none} && exec {sys.executable} -c {shlex.quote(RUN)} 60"
    given = {"env": ENVIRONMENT, "input": "print(1)", "capture_output": True, "text": True}
    done = subprocess.run([*NEW_USER, "sh", "-c", command], timeout=WAIT_S, **given)
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: code sandbox: ")
    assert "unshare" in last and "docs/rewards.md" in last


def test_a_sandbox_dies_with_the_process_that_asked_for_it():
    ready = "import sys\nprint('ready', flush=True)\n"
    command = [sys.executable, "-c", ready + RUN, "600"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owner = subprocess.Popen(command, env=ENVIRONMENT, **pipes)
    assert owner.stdin and owner.stdout and owner.stdout.readline() == "ready\n"
    with owner.stdin:
        owner.stdin.write("import time; time.sleep(600)")
    below = []
    while len(below) < 3:  # the sandbox's two processes and the program
        with pytest.raises(subprocess.TimeoutExpired):
            owner.wait(0.05)
        below = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=WAIT_S)
    assert not alive


def test_limits_within_which_no_program_runs_are_named():
    with pytest.raises(ValueError, match="file_mib=0,"):  # nothing can be written
        CodeSandbox(Limits(file_mib=0))
    with pytest.raises(ValueError, match="memory_mib: 100 given"):
        CodeSandbox(Limits(memory_mib=100))

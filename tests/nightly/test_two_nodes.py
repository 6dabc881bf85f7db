"""One run on two machines that share a folder: equal to one machine, and through every fault."""

import contextlib
import json
import re
import subprocess
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
from lib.machines import BIN, TwoMachines, why_not
from lib.tune import VLLM
from lib.whole_runs import AGENTS, assert_same_run, records

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "async_grpo_full_finetune_distributed.py"
POLICY = Path("/tmp/torchtune-async-grpo")
SHARED = Path("/tmp/shared")
"""Folder that both machines see."""
WORK = SHARED / "work"
REWARD = """
class Shortness:
    max_reward = 1.0

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0 / (1 + len(response_text))
"""
AGENT = """
import time

from openai import OpenAI


def run(task):
    ask, text = OpenAI(max_retries=0).chat.completions.create, task["prompt_text"]
    for _ in range(4):
        messages = [{"role": "user", "content": text}]
        answer = ask(model="policy", messages=messages, max_tokens=4)
        text += answer.choices[0].message.content
        time.sleep(0.5)
    return float(task["seed"] % 2)
"""
SPLIT = ["cpu_threads.trainer=3", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=8"]
"""With 5 CPUs a machine, the two ranks are on two machines, and so are the generators."""
SYNCHRONOUS = ["max_staleness=0", "pull_every_m_rollouts=1", "save_every_n_steps=2"]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"two machines on one: {why_not()}"),
]


@pytest.fixture(scope="module")
def make_machines(tiny_policy, tmp_path_factory):
    """Returns a function that makes two machines with a Ray cluster."""
    made = []

    def make(*cpus, **environment):
        shared = tmp_path_factory.mktemp("shared")
        (shared / WORK.name).mkdir()
        two = TwoMachines({POLICY: POLICY, shared: SHARED}, cpus)
        made.append(two)
        two.a.environment |= environment  # the same of both
        two.start_ray()
        return two

    yield make
    for two in made:
        two.close()


@pytest.fixture(scope="module")
def two(make_machines):
    """Two machines with a fork of the recipe and a reward of their user."""
    machines = make_machines(5, 5)
    folder = machines.a.path(WORK)
    (folder / "lengths.py").write_text(REWARD)
    recipe = RECIPE.read_text().replace("return losses, {", "return 2 * losses, {")
    assert recipe != RECIPE.read_text()
    (folder / "my_grpo.py").write_text(recipe)
    return machines


def start(two, output_dir, *overrides, recipe=RECIPE.stem, address="auto"):
    command = [BIN / "tune", "run", recipe, "--config", "tiny_async_grpo_2x2"]
    settings = [f"output_dir={output_dir}", f"ray.address={address}", VLLM, *overrides]
    # nsenter keeps the working directory of this machine; env -C sets it on the other.
    return two.a.start(
        *("env", "-C", WORK, *command, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, on_line=lambda line: None, timeout_s=300):
    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        on_line(line)
    timer.cancel()
    return process.wait(30), "".join(lines)


def once(pattern, action):
    """A function of a printed line that acts at the first one with a pattern."""
    waiting = [pattern]

    def on_line(line):
        if waiting and re.search(waiting[0], line):
            waiting.clear()
            action()

    return on_line


def assert_clean(*machines):
    """Only Ray's own processes and folders are left."""
    for machine in machines:
        running = machine.processes().values()
        ours = ("RoleHost", "tune", "agents.host")
        assert not [line for line in running if any(word in line for word in ours)], running
        left = [path.name for path in machine.path("/tmp").iterdir()]
        assert not [name for name in left if name.startswith("grpo-")], left
        assert not list(machine.path("/dev/shm").glob("sem.*"))


def assert_whole(two, output_dir, says):
    """The audit holds, and every role's log is in the run's folder."""
    command = ("python", "-m", "grpo_components.audit", output_dir)
    table = two.a.run("env", "-C", WORK, *command)
    assert "every rule holds" in table and says in table, table
    logs = two.a.path(output_dir) / "logs"
    started = {record["role"]: record["node"] for record in records(logs / "roles.jsonl")}
    assert all((logs / f"{role}.log").stat().st_size for role in started)
    assert {"generator_0", "generator_1", "trainer_0", "trainer_1"} <= started.keys()
    return started


def assert_nothing_reserved(two):
    """Ray itself says that no placement group of a run is left, and all CPUs are free."""
    script = (
        "import ray, json; ray.init('auto', log_to_driver=False, logging_level='ERROR');"
        "from ray.util import placement_group_table as t;"
        "print(json.dumps([g['state'] for g in t().values()]), ray.available_resources()['CPU'])"
    )
    states, free = two.a.run("python", "-c", script).splitlines()[-1].rsplit(" ", 1)
    assert set(json.loads(states)) <= {"REMOVED"}
    assert float(free) == 10


def without_link(two, run, pattern):
    """A function of a printed line that cuts the link for 20 seconds at the first one like that.

    Also returns a list that tells, afterwards, whether the run was still under way then.
    """
    outlived = []

    def back():
        outlived.append(run.poll() is None)
        two.link("up")

    def cut():
        two.link("down")
        threading.Timer(20, back).start()

    return once(pattern, cut), outlived


def test_a_synchronous_run_on_two_machines_is_equal_to_one_on_one_to_the_bit(two):
    """Although the link between them is down for 20 seconds of it."""
    mine = [*SYNCHRONOUS, *SPLIT, "num_steps=2", "rewards.short._component_=lengths.Shortness"]
    alone = start(two, f"{SHARED}/alone", *mine, recipe="my_grpo.py", address="null")
    code, output = finish(alone)
    assert code == 0, output
    both = start(two, f"{SHARED}/both", *mine, recipe="my_grpo.py")
    on_line, outlived = without_link(two, both, "evaluating")
    code, output = finish(both, on_line)
    assert (code, outlived) == (0, [True]), output
    assert "joined the Ray cluster at auto: roles on " in output
    started = assert_whole(two, f"{SHARED}/both", "2 steps, policy version 2")
    assert Counter(started.values())["node-b"] >= 2
    assert started["trainer_0"] != started["trainer_1"]
    assert started["generator_0"] != started["generator_1"]
    assert_same_run(two.a.path(f"{SHARED}/alone"), two.a.path(f"{SHARED}/both"), num_steps=2)
    rewards = records(two.a.path(f"{SHARED}/both") / "logs" / "metrics.jsonl")[-1]
    assert any("short" in key for key in rewards)
    assert_clean(two.a, two.b)
    assert_nothing_reserved(two)


def test_two_runs_side_by_side_end_well(two):
    small = ["num_generators=1", "num_trainers=1", "num_references=1", "groups_per_step=2"]
    steps = ["num_steps=2", "group_size=4", "eval_dataset.num_rows=8"]
    folders = (f"{SHARED}/one", f"{SHARED}/other")
    runs = [start(two, folder, *small, *steps) for folder in folders]
    for run in runs:
        code, output = finish(run)
        assert code == 0, output
    for folder in folders:
        says = two.a.run("env", "-C", WORK, "python", "-m", "grpo_components.audit", folder)
        assert "every rule holds" in says
    assert_clean(two.a, two.b)


def test_a_run_whose_link_is_down_for_good_ends_with_one_line(make_machines):
    two = make_machines(5, 5)
    run = start(two, f"{SHARED}/cut", *SPLIT, "num_steps=50")
    code, output = finish(run, once(r"step +3/", lambda: two.link("down")))
    assert code == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "have no room for it" in error or "could not be written" in error
    assert "Traceback" not in output
    assert_clean(two.a)
    audit = two.a.run("env", "-C", WORK, "python", "-m", "grpo_components.audit", f"{SHARED}/cut")
    assert "every rule holds" in audit
    # Roles on the other machine end by themselves, once its Ray has found out.
    namespace = Path(f"/proc/{two.b.pid}/ns/pid").stat().st_ino
    left = [each for each in psutil.process_iter() if is_role_in(each, namespace)]
    assert not psutil.wait_procs(left, timeout=240)[1]


def is_role_in(process, namespace):
    """Whether a process is a role's, in a PID namespace."""
    with contextlib.suppress(psutil.Error, OSError):
        its_own = Path(f"/proc/{process.pid}/ns/pid").stat().st_ino
        return its_own == namespace and "RoleHost" in process.cmdline()[0]
    return False


@pytest.mark.parametrize(
    "groups_are", ["in the answers", "in the memory of their node", "open sessions of agents"]
)
def test_a_run_goes_on_when_a_machine_is_killed_with_all_its_roles(make_machines, groups_are):
    at_most = "1" if groups_are == "in the memory of their node" else "100000"  # bytes in an answer
    # The trainers fit on the first machine, as PACK wants them.
    two = make_machines(9, 5, RAY_max_direct_call_object_size=at_most)
    sizes = ["num_steps=12", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=8"]
    if groups_are == "open sessions of agents":
        (two.a.path(WORK) / "my_agent.py").write_text(AGENT)
        sizes += AGENTS
    run = start(two, f"{SHARED}/run", *sizes, "save_every_n_steps=5")
    code, output = finish(run, once(r"step +3/", two.b.kill), timeout_s=600)
    assert code == 0, output
    restarts = re.findall(r"^(\w+) .*restarting", output, re.MULTILINE)
    assert restarts and set(restarts) <= {"generator_1", "generator_0"}, output
    assert_whole(two, f"{SHARED}/run", "12 steps, policy version 12")
    assert_clean(two.a)


REFUSED = {
    "cpu_threads.trainer: 40 CPU needed on one node": ["cpu_threads.trainer=40"],
    "ray.address: its 2 nodes with 10 CPU have no room": ["num_generators=90"],
    "output_dir: node-b (10.77.0.2) does not see /tmp/mine;": ["output_dir=/tmp/mine"],
    "ray.address: 10.77.0.9:1 given, and it": ["ray.address=10.77.0.9:1"],
    "ray.address: auto given": [],
}
"""What is said -> the overrides of the run; the last one has a wrong token."""


@pytest.fixture(scope="module")
def refused(two):
    """Exit code and output of each refused run. They go side by side, as most of them wait."""
    given, runs = two.a.environment, {}
    for number, (says, overrides) in enumerate(REFUSED.items()):
        token = {} if overrides else {"RAY_AUTH_TOKEN": "0" * 64}
        two.a.environment = given | token
        runs[says] = start(two, f"{SHARED}/refused{number}", *SPLIT, *overrides)
    two.a.environment = given
    ends = {says: finish(run) for says, run in runs.items()}
    assert_clean(two.a, two.b)
    return ends


@pytest.mark.parametrize("says", REFUSED)
def test_what_a_cluster_lacks_and_a_wrong_token_are_one_line_before_any_role_starts(refused, says):
    code, output = refused[says]
    assert code == 2 and output.splitlines()[-1].startswith(f"config error: {says}"), output
    assert "starting parameter_server" not in output


def test_a_run_of_its_own_listens_on_loopback_only_beside_a_cluster(two):
    sizes = ["num_steps=1", "num_generators=1", "num_trainers=1", "eval_dataset.num_rows=8"]
    run = start(two, f"{SHARED}/private", *sizes, "loss.kl_coeff=0", address="null")
    heard = []

    def listen():
        lines = two.a.run("ss", "-ltnpH").splitlines()
        heard.extend(line.split()[3] for line in lines if "ray::RoleHost" in line)

    code, output = finish(run, once(r"step +0", listen))
    assert code == 0, output
    loopback = ("127.0.0.1:", "[::1]:", "[::ffff:127.0.0.1]:")
    assert heard and all(each.startswith(loopback) for each in heard), heard

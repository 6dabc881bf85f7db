"""Agents in processes of their own: how they end, and that nothing of them is left."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from lib.processes import is_alive, until

from grpo_components.agents.processes import AgentProcesses
from grpo_components.agents.rewards import AgentReward, checked_reward
from grpo_components.errors import ConfigError

AGENT = """
import asyncio, os, random, subprocess, sys, time

def plain(task):
    return task["answer"] == os.environ["OPENAI_API_KEY"]

async def coroutine(task):
    await asyncio.sleep(0)
    return {"a": 1, "b": random.random()}

def raises(task):
    raise RuntimeError("no idea")

def exits(task):
    sys.exit(3)

def nonsense(task):
    return "great"

def dies(task):
    os.kill(os.getpid(), 9)

def hangs(task):
    start = ["sleep", "600"]
    children = [subprocess.Popen(start, start_new_session=new).pid for new in (False, True)]
    if (child := os.fork()) == 0:
        os.setsid()
        time.sleep(600)
    pids = [os.getpid(), *children, child]
    open(task["file"], "w").write(" ".join(map(str, pids)))
    time.sleep(600)
"""
TASK = {"answer": "sk-1", "seed": 5}


@pytest.fixture
def agents(tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "broken_agent.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_one(agent, fails_after=None, timeout_s=60.0, **task):
    async def main():
        processes, loop = AgentProcesses(agent), asyncio.get_running_loop()
        failure = loop.create_future()
        variables = {"OPENAI_API_KEY": "sk-1", "OPENAI_BASE_URL": "http://127.0.0.1:1"}
        if fails_after is not None:
            loop.call_later(fails_after, failure.set_result, "enough")
        try:
            return await processes.run({**TASK, **task}, variables, timeout_s, failure)
        finally:
            processes.close()

    return asyncio.run(main())


def test_a_reward_is_what_the_function_returns(agents):
    assert run_one("my_agent.plain").reward == {"reward": 1.0}
    first, again = (run_one("my_agent.coroutine").reward for _ in range(2))
    assert first == again  # the task's seed is that of `random`
    assert first["a"] == 1.0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "agent: RuntimeError (FILE:12): no idea\n"),
        ("exits", "agent: SystemExit (FILE:15): 3\n"),
        ("nonsense", "allowed: a finite number, or such numbers by name"),
        ("dies", "agent: my_agent.dies was killed by SIGKILL"),
    ],
)
def test_an_agent_that_fails_says_how(agents, name, error):
    found = run_one(f"my_agent.{name}").error
    assert error.replace("FILE", str(agents / "my_agent.py")) in found


@pytest.mark.parametrize("fails_after", [None, 3.0])
def test_nothing_is_left_of_an_agent_that_does_not_end(agents, fails_after):
    file = agents / "pids"
    timeout_s = 3.0 if fails_after is None else 60.0
    outcome = run_one("my_agent.hangs", fails_after, file=str(file), timeout_s=timeout_s)
    limit = "agent: TimeoutError: my_agent.hangs did not end in 3 s, half of timeouts.rollout_s"
    assert outcome.error == (limit if fails_after is None else "agent: enough")
    pids = read(file)
    assert len(pids) == 4
    assert not [pid for pid in pids if is_alive(pid)]


OWNER = """
import asyncio, json, sys
from grpo_components.agents.processes import AgentProcesses

async def run():
    processes = AgentProcesses("my_agent.hangs")
    failure = asyncio.get_running_loop().create_future()
    variables = {"OPENAI_API_KEY": "sk-1"}
    await processes.run({"file": sys.argv[1], "seed": 1}, variables, 600.0, failure)

asyncio.run(run())
"""


@pytest.mark.parametrize("host_first", [False, True], ids=["alone", "with what starts agents"])
def test_nothing_is_left_if_the_generator_is_killed(agents, host_first):
    """Ray kills the children of a role with it when the driver is gone."""
    file = agents / "pids"
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(file)], env=environment) as owner:
        assert until(lambda: len(read(file)) == 4)
        if host_first:
            (host,) = psutil.Process(owner.pid).children()
            host.kill()
        owner.send_signal(signal.SIGKILL)
    assert until(lambda: not [pid for pid in read(file) if is_alive(pid)])


def read(file):
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_a_command_reads_its_task_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/its/own")  # not ours: its Python may be another one
    command = python("""
        import json, os, pathlib, sys
        task = json.load(sys.stdin)
        kept = os.environ["OPENAI_API_KEY"], os.environ["PYTHONPATH"]
        pathlib.Path(task["file"]).write_text(" ".join(kept))
        sys.exit(task["status"])
    """)
    file = tmp_path / "key"
    assert run_one(command, file=str(file), status=0).error is None
    assert file.read_text() == "sk-1 /its/own"
    assert run_one(command, file=str(file), status=4).error.endswith("ended with status 4")
    error = run_one(["no-such-program"]).error
    no_file = "no-such-program: [Errno 2] No such file or directory"
    assert error == f"agent: no-such-program ended with status 127: {no_file}"


def test_the_error_of_a_command_is_what_it_said_last(capfd):
    says = 'import sys; sys.stderr.write("x" * 5000 + "\\n"); raise LookupError("no such word")'
    error = run_one(python(says)).error
    first = next(line for line in error.splitlines() if "status" in line)
    assert first.endswith("ended with status 1: LookupError: no such word")
    assert "Traceback (most recent call last)" in error and len(error) < 2000
    logged = capfd.readouterr().err  # all of it is in the log, too
    assert "x" * 5000 in logged and logged.endswith("LookupError: no such word\n")


@pytest.mark.parametrize("agent", ["broken_agent.run", "my_agent.nobody", "no_such_module.run"])
def test_an_agent_that_cannot_be_imported_is_named(agents, agent):
    with pytest.raises(ConfigError, match=f"^environment.agent: {agent} cannot be imported"):
        run_one(agent)


def test_rewards_are_finite_numbers_by_name():
    assert checked_reward(True) == {"reward": 1.0}
    assert checked_reward(None) is None
    for wrong in ("1", float("nan"), {"a": "b"}, {1: 2.0}, [1.0]):
        with pytest.raises(ValueError, match="allowed: a finite number"):
            checked_reward(wrong)
    assert AgentReward("b")(agent_reward={"a": 1.0, "b": 2.0}, prompt_text="x") == 2.0
    for given in (None, {"a": 1.0}):
        with pytest.raises(ValueError, match="no reward named b"):
            AgentReward("b")(agent_reward=given)

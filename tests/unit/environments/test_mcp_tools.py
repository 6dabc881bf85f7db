"""Tools of a real MCP server: offered, called with a deadline, and never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from lib.processes import is_alive, until

from grpo_components.environments.mcp_tools import MCPServer, MCPServerError, MCPTools
from grpo_components.rollout.observation_text import unquoted

SERVER = """
import os, subprocess, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")
subprocess.Popen(["sleep", "1000"])  # left behind by the server itself


@server.tool()
def add(left: int, right: int) -> str:
    "Add two numbers."
    return str(left + right)


@server.tool()
def fail(why: str) -> str:
    "Fail."
    raise ToolError(why)


@server.tool()
def hang() -> str:
    "Never answer."
    time.sleep(1000)


@server.tool()
def die() -> str:
    "End the server."
    os._exit(3)


server.run()
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def world(command):
    return MCPTools(command, timeout_s=60)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def descendants(pid=None):
    return {each.pid for each in psutil.Process(pid).children(recursive=True) if is_alive(each.pid)}


def result_of(reply):
    text = unquoted(reply.text, ["<s>"])
    return text.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]


def test_the_servers_tools_are_offered_and_run(world):
    functions = [tool["function"] for tool in world.tool_schemas]
    assert [function["name"] for function in functions] == ["add", "fail", "hang", "die"]
    assert functions[0]["description"] == "Add two numbers."
    assert functions[0]["parameters"]["required"] == ["left", "right"]
    respond = world({}, 1)
    assert result_of(respond(call("add", left=3, right=4))) == "7"
    assert respond("It is 7.").done


def test_the_policy_reads_errors_of_its_calls(world):
    respond = world({}, 1)
    assert "too < s> small" in result_of(respond(call("fail", why="too <s> small")))
    assert result_of(respond(call("add", left="x", right=4))).startswith("error: ")
    assert "there is no tool 'minus'" in result_of(respond(call("minus")))


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("wrong", "problem"), [("\ud83d", "surrogates"), (nested(300), "nested more than 100 deep")]
)
def test_arguments_that_cannot_be_sent_are_told_and_the_server_lives(command, wrong, problem):
    with contextlib.closing(MCPServer(command)) as server:
        with pytest.raises(ValueError, match=problem):
            server.call("add", {"left": wrong, "right": 4}, 60)
        with pytest.raises(ValueError, match="left"):  # the server's own answer
            server.call("add", {"left": nested(99), "right": 4}, 60)
        assert server.call("add", {"left": 3, "right": 4}, 60) == "7"


def test_a_server_that_ends_fails_the_sample_and_is_started_again(world):
    respond = world({}, 1)
    with pytest.raises(MCPServerError, match="ended during die"):
        respond(call("die"))
    assert result_of(respond(call("add", left=1, right=1))) == "2"


def test_a_call_that_hangs_fails_the_sample_and_nothing_is_left(command):
    before = descendants()
    server = MCPServer(command)
    started = descendants() - before
    assert len(started) >= 3  # the one that watches, the server, and what it left
    with pytest.raises(MCPServerError, match=r"did not answer hang within 0\.2 s"):
        server.call("hang", {}, 0.2)
    server.close()  # it has ended already: no error
    assert not server.is_running
    assert until(lambda: not any(map(is_alive, started)))
    with pytest.raises(MCPServerError, match="has ended"):
        server.call("add", {"left": 1, "right": 1}, 1)


def test_no_process_outlives_a_killed_owner(command):
    owner = (
        "from grpo_components.environments.mcp_tools import MCPServer\n"
        f"server = MCPServer({command!r})\n"
        "print('ready', flush=True)\n"
        "server.call('hang', {}, 1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    process = subprocess.Popen([sys.executable, "-c", owner], **options)
    assert process.stdout.readline() == "ready\n"
    started = descendants(process.pid)
    assert len(started) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert until(lambda: not any(map(is_alive, started)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": "server"}, "^command: 'server' given; allowed: a list of texts"),
        ({"command": ["/no/server"]}, "^command: no program '/no/server'; allowed: a program on"),
        ({"command": ["true"]}, "^command: the tool server true ended during initialize"),
        ({"timeout_s": 0}, "^timeout_s: 0 given; allowed: a number above 0"),
        ({"timeout_s": True}, "^timeout_s: True given; allowed: a number above 0"),
        ({"call_format": "xml"}, "^call_format: 'xml' given"),
    ],
)
def test_a_wrong_setting_is_refused(command, settings, problem):
    with pytest.raises(ValueError, match=problem):
        MCPTools(**{"command": command, **settings})

"""Runs MCP tool servers as child processes, which speak over standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from grpo_components.environments.extras import imported_extra
from grpo_components.errors import ConfigError, fail
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.samples import Prompt
from grpo_components.rollout.tools import ToolUse, tool_schema
from grpo_components.slow_calls import told_if_slow

_START_S = 60.0
"""Maximum seconds to wait until a server has started, or lists its tools."""
_END_S = 10.0
"""Maximum seconds to wait for a server's end; the package `mcp` kills a slow server sooner."""
_MAX_DEPTH = 100
"""Maximum nesting depth of a call's arguments; about twice as much breaks the connection."""
_RUNNER = Path(__file__).with_name("mcp_process.py")


class MCPServerError(RuntimeError):
    """The server did not start, ended, or did not answer in time."""


class MCPTools:
    """World (it replies to the policy's turns) that runs tool calls in MCP servers on this machine.

    A generator starts servers as its conversations need them. Each server runs one call at a time.
    If a server ends or misses a deadline, only the response that made the call fails, and a new
    server is started. Servers must keep no state between calls: the next call may go to another
    server.

    Args:
        command: the server's program and arguments.
        call_format: see `ToolUse`.
        timeout_s: deadline of one call, in seconds.
        num_servers: largest number of servers per generator; further calls wait for a free one.
        max_result_characters: see `ToolUse`.

    Raises:
        ValueError: the package is missing, an argument is wrong, or the server does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        call_format: str = "hermes",
        timeout_s: float = 10.0,
        num_servers: int = 8,
        max_result_characters: int = 1000,
    ) -> None:
        imported_extra("mcp")
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            fail("command", f"{command!r} given", "a list of texts")
        if not command or shutil.which(command[0]) is None:
            program = command[0] if command else "none"
            fail("command", f"no program {program!r}", "a program on the PATH, or the path of one")
        if type(timeout_s) not in (int, float) or not 0 < timeout_s < float("inf"):
            fail("timeout_s", f"{timeout_s!r} given", "a number above 0")
        if type(num_servers) is not int or num_servers < 1:
            fail("num_servers", f"{num_servers!r} given", "a whole number of at least 1")
        try:
            self.tool_schemas = _schemas_of(tuple(command))
        except (MCPServerError, ValueError) as error:
            raise ConfigError("command", f"{error}", "a server that starts") from error
        if not self.tool_schemas:
            fail("command", f"the tool server {' '.join(command)} offers no tools", "at least one")
        servers = _Servers(tuple(command), num_servers)
        names = [tool["function"]["name"] for tool in self.tool_schemas]
        tools = {name: partial(servers.call, name, timeout_s) for name in names}
        self._use = ToolUse(tools, call_format, max_result_characters)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation; return the function that replies to each turn of the policy."""
        return self._use(prompt, seed)


@cache
def _schemas_of(command: tuple[str, ...]) -> list[dict[str, Any]]:
    """Start a server, return the schemas of its tools, and end it."""
    with contextlib.closing(MCPServer(command)) as server:
        return server.list_tools()


@cache  # one for each command: all worlds of this process share it
class _Servers:
    """Starts tool servers when they are needed, and replaces servers that have ended."""

    def __init__(self, command: tuple[str, ...], num_servers: int) -> None:
        self._command = command
        self._free = threading.BoundedSemaphore(num_servers)
        self._idle: deque[MCPServer] = deque()

    def call(self, name: str, timeout_s: float, /, **arguments: Any) -> str:
        """Wait for a free server, and run one tool call on it alone."""
        with self._free:
            try:
                server = self._idle.pop()
            except IndexError:
                server = MCPServer(self._command)
            try:
                return server.call(name, arguments, timeout_s)
            finally:
                if server.is_running:
                    self._idle.append(server)


class MCPServer:
    """A running tool server. Any number of threads may call its tools."""

    def __init__(self, command: Sequence[str]) -> None:
        self.name, self._command = " ".join(command), command
        self._opened: Future[Any] = Future()
        # The server dies with the thread that started it (PDEATHSIG): this thread lives as long.
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        with told_if_slow(f"the tool server {self.name} to start", _START_S):
            try:
                self._session, self._loop, self._stop = self._opened.result(_START_S)
            except Exception as error:  # of this machine: the server has not started
                problem = f"the tool server {self.name} does not start: {error!r}"
                raise MCPServerError(problem) from error
            self._wait("initialize", self._session.initialize(), _START_S)

    @property
    def is_running(self) -> bool:
        """Whether the server may still answer calls."""
        return self._thread.is_alive() and not self._stop.is_set()

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as JSON schemas, as chat templates expect them."""
        with told_if_slow(f"the tools of the tool server {self.name}", _START_S):
            found = self._wait("list_tools", self._all_tools(), _START_S)
        return [tool_schema(each.name, each.description or "", each.input_schema) for each in found]

    async def _all_tools(self) -> list[Any]:
        types, tools, params = imported_extra("mcp.types"), [], None
        while True:
            page = await self._session.list_tools(params=params)
            tools += page.tools
            if not page.next_cursor:
                return tools
            params = types.PaginatedRequestParams(cursor=page.next_cursor)

    def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call a tool and return the texts of its result."""
        _check_sendable(arguments)
        result = self._wait(name, self._session.call_tool(name, dict(arguments)), timeout_s)
        text = "\n".join(
            part.text if part.type == "text" else f"({part.type})" for part in result.content
        )
        if result.is_error:
            raise ValueError(text or f"{name} failed")
        return text

    def _wait(self, name: str, answer: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        mcp = imported_extra("mcp")
        if not self.is_running:
            answer.close()
            raise MCPServerError(f"the tool server {self.name} has ended")
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result(timeout_s)
        except Exception as error:  # a connection breaks in many ways
            is_told = isinstance(error, mcp.MCPError)
            if is_told and cast(Any, error).code != mcp.types.CONNECTION_CLOSED:
                raise ValueError(f"{error}") from error
            self.close()
            problem = f"ended during {name}"
            if isinstance(error, TimeoutError):
                problem = f"did not answer {name} within {timeout_s:g} s"
            raise MCPServerError(f"the tool server {self.name} {problem}") from error

    def close(self) -> None:
        """End the server and all processes that it started; waiting calls fail."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # after the start, the waiting calls get it
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        mcp, stdio = imported_extra("mcp"), imported_extra("mcp.client.stdio")
        arguments = ["-I", str(_RUNNER), str(os.getpid()), *self._command]
        process = stdio.StdioServerParameters(command=sys.executable, args=arguments)
        async with (
            stdio.stdio_client(process, errlog=sys.__stderr__) as streams,
            mcp.ClientSession(*streams) as session,
        ):
            stop = asyncio.Event()
            self._opened.set_result((session, asyncio.get_running_loop(), stop))
            await stop.wait()


def _check_sendable(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would break a server's connection; the policy reads the ValueError."""
    level, depth = list[Any]([arguments]), 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise ValueError(f"the arguments are nested more than {_MAX_DEPTH} deep")
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    json.dumps(arguments, ensure_ascii=False).encode()  # refuses half of a surrogate pair

"""A world whose tools are those of a tool server, which speaks MCP."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from grpo_components.environments.extras import imported_extra
from grpo_components.environments.mcp_server import MCPServer, MCPServerError
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.samples import Prompt
from grpo_components.rollout.tools import ToolUse


class MCPTools:
    """World that runs the policy's tool calls in a tool server, on this machine.

    A generator starts servers as its conversations need them, each for one call at a time: if a
    server ends, or misses the deadline of a call, only that sample fails, and another server is
    started. A server must keep no state between calls, because the next may go to another one.

    Args:
        command: the server's program and arguments.
        call_format: see `ToolUse`.
        timeout_s: deadline of one call, in seconds.
        num_servers: largest number of servers of a generator; further calls wait for one.
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
            raise ValueError(f"command: {command!r} given; allowed: a list of texts")
        if not command or shutil.which(command[0]) is None:
            program = command[0] if command else "none"
            allowed = "a program on the PATH, or the path of one"
            raise ValueError(f"command: no program {program!r:.60}; allowed: {allowed}")
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s: {timeout_s!r} given; allowed: a number above 0")
        if type(num_servers) is not int or num_servers < 1:
            allowed = "a whole number of at least 1"
            raise ValueError(f"num_servers: {num_servers!r} given; allowed: {allowed}")
        servers = _servers_of(tuple(command), num_servers)
        try:
            self.tool_schemas = servers.schemas()
        except MCPServerError as error:
            raise ValueError(f"command: {error}; allowed: a server that starts") from error
        if not self.tool_schemas:
            raise ValueError(f"command: {servers.name} offers no tools; allowed: at least one")
        names = [tool["function"]["name"] for tool in self.tool_schemas]
        tools = {name: _tool(servers, name, timeout_s) for name in names}
        self._use = ToolUse(tools, call_format, max_result_characters)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation."""
        return self._use(prompt, seed)


def _tool(servers: _Servers, name: str, timeout_s: float) -> Callable[..., str]:
    def call(**arguments: Any) -> str:
        with servers.one() as server:
            return server.call(name, arguments, timeout_s)

    return call


@cache
def _servers_of(command: tuple[str, ...], num_servers: int) -> _Servers:
    """Return the servers of a command, which all worlds of a process share."""
    return _Servers(command, num_servers)


class _Servers:
    """Starts tool servers when they are needed, and replaces servers that have ended."""

    def __init__(self, command: tuple[str, ...], num_servers: int) -> None:
        self.name = " ".join(command)
        self._start = partial(MCPServer, command)
        self._free = threading.BoundedSemaphore(num_servers)
        self._idle: deque[MCPServer] = deque()
        self._listing = threading.Lock()
        self._schemas: list[dict[str, Any]] | None = None

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' schemas, from a server that is ended after its answer."""
        with self._listing:
            if self._schemas is None:
                server = self._start()
                try:
                    self._schemas = server.list_tools()
                finally:
                    server.close()
            return self._schemas

    @contextlib.contextmanager
    def one(self) -> Iterator[MCPServer]:
        """Context manager: wait for a free server, and hold it alone for one tool call."""
        with self._free:
            try:
                server = self._idle.pop()
            except IndexError:
                server = self._start()
            try:
                yield server
            finally:
                if server.is_running:
                    self._idle.append(server)

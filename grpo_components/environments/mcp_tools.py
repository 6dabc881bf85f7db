"""A world whose tools are those of a tool server, which speaks MCP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from grpo_components.environments.extras import imported_extra
from grpo_components.environments.mcp_server import MCPServer, MCPServerError
from grpo_components.rollout.environments import Prompt
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.tools import ToolUse


class MCPTools:
    """World that runs the policy's tool calls in a tool server, on this machine.

    The server is started at the first call of a generator, and serves all its conversations. A
    server that ends, or misses the deadline of a call, fails the samples that wait for it; the next
    call starts it again.

    Args:
        command: the server's program and arguments.
        call_format: see `ToolUse`.
        timeout_s: deadline of one call, in seconds.
        max_result_characters: see `ToolUse`.

    Raises:
        ValueError: the package is missing, an argument is wrong, or the server does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        call_format: str = "hermes",
        timeout_s: float = 10.0,
        max_result_characters: int = 1000,
    ) -> None:
        imported_extra("mcp")
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            raise ValueError(f"command: {command!r} given; allowed: a list of texts")
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s: {timeout_s!r} given; allowed: a number above 0")
        server = _server_of(tuple(command))
        try:
            self.tool_schemas = server.schemas()
        except MCPServerError as error:
            raise ValueError(f"command: {error}; allowed: a server that starts") from error
        if not self.tool_schemas:
            raise ValueError(f"command: {server.name} offers no tools; allowed: at least one")
        names = [tool["function"]["name"] for tool in self.tool_schemas]
        tools = {name: _tool(server, name, timeout_s) for name in names}
        self._use = ToolUse(tools, call_format, max_result_characters)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation.

        Args:
            prompt: not used.
            seed: not used.
        """
        return self._use(prompt, seed)


def _tool(server: _Server, name: str, timeout_s: float) -> Callable[..., str]:
    def call(**arguments: Any) -> str:
        return server.running().call(name, arguments, timeout_s)

    return call


@cache
def _server_of(command: tuple[str, ...]) -> _Server:
    """Return the server of a command, of which a process has one."""
    return _Server(command)


class _Server:
    """Starts a tool server when it is needed, and again when it has ended."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.name = " ".join(command)
        self._start = partial(MCPServer, command)
        self._lock = threading.Lock()
        self._server: MCPServer | None = None
        self._schemas: list[dict[str, Any]] | None = None

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' schemas; asked of a server that ends with the answer."""
        with self._lock:
            if self._schemas is None:
                server = self._start()
                try:
                    self._schemas = server.list_tools()
                finally:
                    server.close()
            return self._schemas

    def running(self) -> MCPServer:
        with self._lock:
            if self._server is None or not self._server.is_running:
                self._server = self._start()
            return self._server

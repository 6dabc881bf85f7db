"""Runs a tool server, which speaks MCP over standard input and output, as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from grpo_components.environments.extras import imported_extra
from grpo_components.slow_calls import told_if_slow

_START_S = 60.0
"""Seconds for a server to start."""
_END_S = 10.0
"""Seconds to wait for the end of a server, which is killed before."""
_RUNNER = Path(__file__).with_name("mcp_process.py")


class MCPServerError(RuntimeError):
    """The server did not start, ended, or did not answer in time."""


class MCPServer:
    """A running tool server. Any number of threads may call its tools."""

    def __init__(self, command: Sequence[str]) -> None:
        self.name = " ".join(command)
        self._command = list(command)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[Any] = Future()
        # The server dies with the thread that started it (PDEATHSIG): this one lives as long.
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        try:
            with told_if_slow(f"the tool server {self.name} to start", _START_S):
                self._session = self._started.result(_START_S)
        except Exception as error:
            self.close()
            reason = "it did not answer" if isinstance(error, TimeoutError) else str(error)
            raise MCPServerError(f"the tool server {self.name} does not start: {reason}") from error

    @property
    def is_running(self) -> bool:
        """Whether calls may still be answered."""
        return self._thread.is_alive() and not self._stop.is_set()

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as JSON schemas, as chat templates expect them."""
        with told_if_slow(f"the tools of the tool server {self.name}", _START_S):
            found = self._wait("list_tools", self._all_tools(), _START_S)
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in found
        ]

    async def _all_tools(self) -> list[Any]:
        types, tools, cursor = imported_extra("mcp.types"), [], None
        while True:
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._session.list_tools(params=params)
            tools += page.tools
            if not (cursor := page.next_cursor):
                return tools

    def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call a tool and return the texts of its result."""
        result = self._wait(name, self._session.call_tool(name, dict(arguments)), timeout_s)
        others = [part.type for part in result.content if part.type != "text"]
        text = "\n".join(
            part.text if part.type == "text" else f"({part.type})" for part in result.content
        )
        if result.is_error:
            raise ValueError(text or f"{name} failed, with a result of {others}")
        return text

    def _wait(self, name: str, answer: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        mcp_error = imported_extra("mcp").MCPError
        closed = imported_extra("mcp.types").CONNECTION_CLOSED
        if not self.is_running:
            answer.close()
            raise MCPServerError(f"the tool server {self.name} has ended")
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result(timeout_s)
        except TimeoutError as error:
            self.close()
            problem = f"the tool server {self.name} did not answer {name} within {timeout_s:g} s"
            raise MCPServerError(problem) from error
        except mcp_error as error:
            if error.error.code != closed:
                raise ValueError(f"{error}") from error
            problem = error
        except Exception as error:  # its connection is broken, in one of many ways
            problem = error
        self.close()
        raise MCPServerError(f"the tool server {self.name} ended during {name}") from problem

    def close(self) -> None:
        """End the server and all that it started; calls that wait for it fail."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # given to those who wait for it
            if not self._started.done():
                self._started.set_exception(_first(error))
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _serve(self) -> None:
        mcp, stdio = imported_extra("mcp"), imported_extra("mcp.client.stdio")
        process = stdio.StdioServerParameters(
            command=sys.executable,
            args=["-I", str(_RUNNER), str(os.getpid()), *self._command],
        )
        async with (
            stdio.stdio_client(process, errlog=sys.__stderr__) as (reading, writing),
            mcp.ClientSession(reading, writing) as session,
        ):
            await session.initialize()
            self._started.set_result(session)
            await self._stop.wait()


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

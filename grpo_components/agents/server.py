"""The HTTP server through which agents reach the policy: OpenAI's paths, on localhost."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_components.agents.requests import RequestError
from grpo_components.agents.session import Session

_HOST = "127.0.0.1"
_STOP_S = 10.0
_MAX_BODY = 1 << 21
"""Maximum bytes of a request: tokenizing it blocks the event loop of all sessions."""
_KEEP_ALIVE_S = 3600
"""Seconds that an idle connection is kept: a client that reuses a closed one sees an error."""


class AgentServer:
    """Serves the sessions of agents from an event loop in a thread of its own.

    Each session has an address and a key; a request with another key is refused.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server((_HOST, 0), backlog=4096)
        self.port: int = self._socket.getsockname()[1]
        self.loop = asyncio.new_event_loop()
        """Event loop of the server's thread, in which sessions are created and answer requests."""
        options: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off"}
        options |= {"timeout_keep_alive": _KEEP_ALIVE_S, "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(self._application(), **options))
        self._thread = threading.Thread(target=self._run, name="agent-server", daemon=True)
        self.ended: str | None = None
        """Why the server has ended; None while it serves."""
        self._running: set[Future[Any]] = set()
        self._thread.start()

    def open(self, session: Session) -> str:
        """Serve a session; return its base URL."""
        self._sessions[session.address] = session
        return f"http://{_HOST}:{self.port}/sessions/{session.address}/v1"

    def close_session(self, session: Session) -> None:
        """Refuse all further requests of a session."""
        session.closed = True
        self._sessions.pop(session.address, None)

    def submit(self, work: Any) -> Future[Any]:
        """Run a coroutine in the event loop; cancel it if the server ends. Any thread may call."""
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def close(self) -> None:
        """Stop the server and its thread."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                try:
                    runner.run(self._server.serve(sockets=[self._socket]))
                    self.ended = "it was closed"
                except BaseException as error:  # whoever waits for a session must hear of it
                    self.ended = repr(error)  # before the runner cancels the sessions
                    raise
        finally:
            for running in list(self._running):  # what came too late to begin
                running.cancel()

    def _application(self) -> Starlette:
        base = "/sessions/{address}/v1"
        handlers: Any = {RequestError: _refused, HTTPException: _unknown, Exception: _failed}
        return Starlette(
            routes=[
                Route(f"{base}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{base}/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers=handlers,
        )

    def _session_of(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["address"])
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        expected = session.key if session else ""
        if not (session and hmac.compare_digest(given.encode(), expected.encode())):
            problem = "the key is wrong, or the session of this address is over"
            raise RequestError(problem, status=401, code="invalid_api_key")
        return session

    async def _reward(self, request: Request) -> Response:
        self._session_of(request).post_reward(await _body(request))
        return JSONResponse({"status": "ok"})

    async def _chat(self, request: Request) -> Response:
        session = self._session_of(request)
        answer = await session.answer(await _body(request))
        if await request.is_disconnected():
            return Response(status_code=499)  # nobody reads it, and the answer is not trained
        session.deliver(answer)
        if answer.request.stream:
            return Response(answer.events(), media_type="text/event-stream")
        # As ASCII: the policy may have written half of a surrogate pair.
        return Response(json.dumps(answer.body), media_type="application/json")


async def _refused(request: Request, error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _unknown(request: Request, error: HTTPException) -> Response:
    known = "POST chat/completions, reward below the base URL"
    problem = f"{request.method} {request.url.path}: not served; allowed: {known}"
    return await _refused(request, RequestError(problem, status=error.status_code))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, RequestError(f"{type(error).__name__}: {error}", status=500))


async def _body(request: Request) -> dict[str, Any]:
    read, size = bytearray(), 0
    async for part in request.stream():  # to its end: else the client may miss the answer
        size += len(part)
        if size <= _MAX_BODY:
            read += part
    if size > _MAX_BODY:
        problem = f"the request has {size} bytes; allowed: at most {_MAX_BODY}"
        raise RequestError(problem, status=413)
    try:
        body = json.loads(read)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # no halves of characters
    except (ValueError, RecursionError) as error:
        problem = str(error).encode(errors="replace").decode()
        raise RequestError(f"the request is not JSON: {problem}") from error
    if not isinstance(body, dict):
        raise RequestError("the request is not a JSON object")
    return body

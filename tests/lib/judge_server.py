"""A small OpenAI-compatible server whose behaviour a test sets, answer by answer."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}


class JudgeServer:
    """Answers requests with the next of `answers`, which a test sets, or with `default`."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.answers: list[Any] = []
        """Next answers: a text, (status, body, headers), or seconds to wait; empty: `default`."""
        self.default: Any = "Score: 5"
        self._lock = threading.Lock()

    def answer(self, request: dict[str, Any], headers: dict[str, str]) -> Any:
        with self._lock:
            self.requests.append(request)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            answer = self.answers.pop(0) if self.answers else self.default
        return answer(request) if callable(answer) else answer


@contextlib.contextmanager
def judge_server(port: int = 0) -> Iterator[JudgeServer]:
    """Run a server, on a free port unless one is given; its address is `url`."""
    judge, closing = JudgeServer(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = judge.answer(json.loads(body), dict(self.headers))
            if isinstance(answer, float):  # seconds of silence
                closing.wait(answer)
                answer = "Score: 5"
            status, text, headers = answer if isinstance(answer, tuple) else (200, answer, {})
            sent = text if isinstance(text, bytes) else json.dumps(completion(text)).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # of a client that gave up
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield judge
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()

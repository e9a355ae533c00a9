"""A small HTTP server that answers what it was given, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | Callable[[], dict[str, Any]] | int


@dataclass(slots=True)
class StandInServer:
    url: str = ""
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def answering(answers: dict[str, Answer]) -> Iterator[StandInServer]:
    """Answers by `METHOD /path`: an object, what makes one, or the number of an error. What is not there is a 404."""
    seen = StandInServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.asked.append(f"{self.command} {self.path}")
            seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = answers.get(seen.asked[-1], 404)
            body = answer() if callable(answer) else answer
            if isinstance(body, int):
                self._send(body, {"error": {"message": f"number {body}"}})
            else:
                self._send(200, body)

        do_POST = do_GET

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()

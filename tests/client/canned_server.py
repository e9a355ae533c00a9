"""An HTTP server that gives fixed responses, one after the other, as a server that is not Onward might."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

CannedResponse = tuple[int, str, bytes]
"""Status, content type and body."""


class CannedServer:
    """Gives its last response to all further requests."""

    def __init__(self, *responses: CannedResponse) -> None:
        self.num_requests = 0
        self._responses = responses
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                status, content_type, body = outer._next()
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _next(self) -> CannedResponse:
        self.num_requests += 1
        return self._responses[min(self.num_requests, len(self._responses)) - 1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

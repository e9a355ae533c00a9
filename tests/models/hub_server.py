"""A small server that speaks as much of the Hugging Face hub's API as a download needs, and can break off."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Hub:
    model_id: str
    folder: Path
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header of each request."""
    break_once: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which the connection is dropped, the first time."""
    failing: set[str] = field(default_factory=set)
    """Files that are answered with a 403."""
    revisions: dict[str, tuple[str, Path]] = field(default_factory=dict)
    """Commit and folder of further branches and tags, by their names. `main` is `folder` at `COMMIT`."""
    is_down: bool = False
    """Every connection is dropped without an answer."""
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of all files that were asked for."""
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    def revision(self, name: str) -> tuple[str, Path] | None:
        """By a name or a commit."""
        known = {"main": (COMMIT, self.folder)} | self.revisions
        return (known | {commit: (commit, folder) for commit, folder in known.values()}).get(name)

    def downloads(self, file: str) -> list[str | None]:
        """The Range headers of all GETs of a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + file)]

    def entry(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        entry = {"type": "file", "path": path.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(_HubHandler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _HubHandler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.served
        path = self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.is_down:
            self.close_connection = True
            return
        parts = path.removeprefix("/api/models").removeprefix(f"/{hub.model_id}").strip("/").split("/")
        if f"/{hub.model_id}" not in path:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        found = hub.revision(parts[1] if len(parts) > 1 else "main")
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, folder = found
        files = sorted(folder.iterdir())
        match parts[0]:
            case "" | "revision":
                siblings = [{"rfilename": file.name} for file in files]
                self._send_json({"id": hub.model_id, "sha": commit, "siblings": siblings})
            case "tree":
                self._send_json([hub.entry(file) for file in files])
            case _:
                self._send_file(folder / parts[-1], commit)

    def _send_file(self, file: Path, commit: str) -> None:
        hub = self.served
        if file.name in hub.failing:
            self._send(403, b"", {})
            return
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        limit = hub.break_once.pop(file.name, None) if self.command == "GET" else None
        self._send(status, content[start:], headers, break_after=limit)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], break_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:break_after])
        if break_after is not None:
            self.close_connection = True

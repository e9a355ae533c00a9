"""A collector of OpenTelemetry: a real HTTP server that decodes what it is sent by OTLP's own protobuf definitions."""

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

PATIENCE_S = 30.0


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    """The trace and the span of each."""
    is_error: bool
    resource: dict[str, Any]
    trace_state: str = ""

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]

    @property
    def linked_spans(self) -> list[str]:
        return [span_id for _, span_id in self.links]


class OtlpReceiver:
    """`status`: what it answers; spans are kept whatever it is."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        spans = [
            _received(span, _values(of_resource.resource.attributes))
            for of_resource in message.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._changed:
            self.paths.append(path)
            self.headers.append(headers)
            self._spans += spans
            self._changed.notify_all()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def clear(self) -> None:
        with self._changed:
            self._spans.clear()

    def named(self, name: str) -> list[ReceivedSpan]:
        """In the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def wait_until(self, is_there: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        until_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while not is_there(self._spans):
                left_s = until_s - time.monotonic()
                shown = "\n".join(f"{span.trace_id} {span.name} {span.attributes}" for span in self._spans)
                assert left_s > 0, f"not among the spans:\n{shown}"
                self._changed.wait(left_s)
            return list(self._spans)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _received(span: Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == Status.STATUS_CODE_ERROR,
        resource,
        span.trace_state,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

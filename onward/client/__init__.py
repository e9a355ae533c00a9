"""Clients for streams of an Onward server that survive broken connections and killed servers.

    with ResumingClient("http://127.0.0.1:8000") as client:
        for chunk in client.stream("/v1/chat/completions", {"model": …, "messages": …}):
            …

A stream is resumed by `Last-Event-ID`, and each event is delivered once. Needs the extra `onward[client]`, and imports
nothing of the server.
"""

from onward.client.failures import ReceivedOutput, StreamFailed
from onward.client.options import ResumeOptions
from onward.optional_packages import require_httpx

require_httpx("onward.client")

from onward.client.resuming_client import AsyncResumingClient, ResumingClient, resume_streams  # noqa: E402
from onward.client.resuming_transport import AsyncResumingTransport, ResumingTransport  # noqa: E402

__all__ = [
    "AsyncResumingClient",
    "AsyncResumingTransport",
    "ReceivedOutput",
    "ResumeOptions",
    "ResumingClient",
    "ResumingTransport",
    "StreamFailed",
    "resume_streams",
]

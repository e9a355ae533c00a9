"""Copies of clients of httpx and httpx2 that resume streams.

A copy has the settings of the original and sends through its transports, which have its proxies, certificates and
connection limits. Closing either one closes the connections of both.
"""

from collections.abc import Callable
from typing import Any

from onward.client.http_package import http_package
from onward.client.options import OnResume, ResumeOptions
from onward.client.resuming_transport import AsyncResumingTransport, ResumingTransport

_SETTINGS = (
    "auth",
    "params",
    "headers",
    "cookies",
    "timeout",
    "follow_redirects",
    "max_redirects",
    "event_hooks",
    "base_url",
    "trust_env",
)


def resuming_http_client(original: Any, options: ResumeOptions, on_resume: OnResume | None) -> Any:
    def wrap(inner: Any) -> ResumingTransport:
        return _SharedTransport(original, inner, options, on_resume)

    return http_package(original).Client(**_arguments(original, wrap))


def async_resuming_http_client(original: Any, options: ResumeOptions, on_resume: OnResume | None) -> Any:
    def wrap(inner: Any) -> AsyncResumingTransport:
        return _AsyncSharedTransport(original, inner, options, on_resume)

    return http_package(original).AsyncClient(**_arguments(original, wrap))


def _arguments(original: Any, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    settings = {name: getattr(original, name) for name in _SETTINGS}
    # A client keeps no record of its proxies, certificates and limits: only its transports have them.
    mounts = {pattern.pattern: inner and wrap(inner) for pattern, inner in original._mounts.items()}
    return settings | {"transport": wrap(original._transport), "mounts": mounts}


class _SharedTransport(ResumingTransport):
    """Refers to the client that it shares a transport with: an OpenAI client that is collected closes its transports."""

    def __init__(self, original: Any, inner: Any, options: ResumeOptions, on_resume: OnResume | None) -> None:
        super().__init__(inner, options=options, on_resume=on_resume)
        self._original = original

    def close(self) -> None:
        self._original.close()


class _AsyncSharedTransport(AsyncResumingTransport):
    def __init__(self, original: Any, inner: Any, options: ResumeOptions, on_resume: OnResume | None) -> None:
        super().__init__(inner, options=options, on_resume=on_resume)
        self._original = original

    async def aclose(self) -> None:
        await self._original.aclose()

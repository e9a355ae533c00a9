"""Pages of other origins: what a browser has to be told before it lets them read an answer. `cross_site` refuses them."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from onward.proto.router import IGNORED_FIELDS_HEADER


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, which pages of these origins may call."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED_FIELDS_HEADER],
    )

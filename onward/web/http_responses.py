"""Responses of routes that describe the server itself."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.obs.prometheus_text import render
from onward.proto.stats import MetricFamily
from onward.web.auth.authenticator import is_authenticated

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def health_response(request: Request, status: str, reason: str | None) -> Response:
    """Returns the response of a health check. A probe has no key and gets only the status; a caller with a key also
    gets the reason."""
    fields = {"status": status}
    if reason is not None and is_authenticated(request.scope):
        fields["reason"] = reason
    return json_response(fields, 200 if status == "ok" else 503)


def metrics_response(families: Iterable[MetricFamily]) -> Response:
    return Response(render(families), headers={"content-type": METRICS_TYPE})

"""Answers of routes that tell about the server itself."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.responses import Response

from onward.obs.metrics import render
from onward.proto.stats import Family

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def metrics_response(families: Iterable[Family]) -> Response:
    return Response(render(families), headers={"content-type": METRICS_TYPE})

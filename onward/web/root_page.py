"""`/`: redirects a browser to `/ui`; any other client gets JSON with the server's name and version and the paths of its
pages.

It needs no API key, so it contains nothing that depends on the configuration: no model, no instance, no host.
"""

from starlette.requests import Request
from starlette.responses import Response

from onward.version import __version__
from onward.web import docs_page
from onward.web.http_responses import json_response
from onward.web.ui.static_files import PAGE_PATH, SECURITY_HEADERS

PATH = "/"
LINKS = {
    "ui": PAGE_PATH,
    "docs": docs_page.PATH,
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
}
_HEADERS = SECURITY_HEADERS | {"vary": "accept"}


async def show(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        # The location is relative: behind a proxy the server may be below another path, and `Host` is the client's
        # choice.
        return Response(status_code=307, headers=_HEADERS | {"location": PAGE_PATH.removeprefix("/")})
    response = json_response({"name": "onward", "version": __version__} | LINKS)
    response.headers.update(_HEADERS)
    return response

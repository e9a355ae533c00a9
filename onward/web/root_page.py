"""`/`: a browser is sent to `/ui`; any other client gets JSON that says what this server is and where its pages are.

Open to everybody, so it names nothing that depends on the configuration: no model, no instance, no host.
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
        # Relative: behind a proxy the server may stand below another path, and its own host name is the client's word.
        return Response(status_code=307, headers=_HEADERS | {"location": PAGE_PATH.removeprefix("/")})
    response = json_response({"name": "onward", "version": __version__} | LINKS)
    response.headers.update(_HEADERS)
    return response

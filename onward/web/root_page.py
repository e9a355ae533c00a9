"""`/`: what this server is and where its documentation is, as JSON, or as a page for browsers.

Open to everybody, so it names nothing that depends on the configuration: no model, no instance, no host.
"""

from starlette.requests import Request
from starlette.responses import Response

from onward.version import __version__
from onward.web import docs_page
from onward.web.http_responses import json_response

PATH = "/"
LINKS = {"docs": docs_page.PATH, "openapi": "/openapi.json", "models": "/v1/models", "health": "/health"}
_ITEMS = "".join(f'<li><a href="{path}">{name}</a></li>' for name, path in LINKS.items())
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Onward</title></head>'
    f"<body><h1>Onward {__version__}</h1><p>An LLM inference server with the API of OpenAI.</p>"
    f"<ul>{_ITEMS}</ul></body></html>\n"
)
_HEADERS = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "vary": "accept",
}


async def show(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return Response(PAGE, media_type="text/html", headers=_HEADERS)
    response = json_response({"name": "onward", "version": __version__} | LINKS)
    response.headers.update(_HEADERS)
    return response

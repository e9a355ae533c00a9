"""`/docs`: a page for people that shows `/openapi.json`, and sends requests by hand.

One file of our own that loads nothing from anywhere else, and may not by its own policy. It says nothing about the server,
so it is open to everybody: a browser sends no key with a page. The document is asked for with the key that the reader
enters, which stays in the page.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PATH = "/docs"
PAGE = Path(__file__).with_name("docs_page.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    [text] = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; connect-src 'self'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


async def show(_: Request) -> Response:
    return Response(PAGE, media_type="text/html", headers=_HEADERS)

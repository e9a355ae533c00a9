"""`/docs`: a page for people that shows `/openapi.json` and sends requests by hand.

The page is one file. It loads nothing from other hosts, and its content security policy forbids it to. It contains
nothing about the server, so it needs no API key: a browser sends no key with a page. The page fetches the document with
the key that the reader enters, which stays in the page.
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

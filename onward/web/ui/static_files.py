"""The files of `/ui`: hand-written HTML, CSS and JavaScript, served from the package as they are.

They contain nothing about the server, so they need no API key: a browser sends no key with a page. The page fetches its
data with the reader's key. The content security policy lets a page load from and call its own server only, and lets no
text become script.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

PAGE_PATH = "/ui"
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NAMES = (
    "answer_stream.js",
    "app.js",
    "conversations.js",
    "dom.js",
    "icon.svg",
    "live.js",
    "message_view.js",
    "playground.js",
    "server.js",
    "ui.css",
)
PATHS = frozenset({PAGE_PATH, *(f"{PAGE_PATH}/{name}" for name in NAMES)})
"""Paths of the page and of all files that it loads."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


def read_static_file(name: str) -> StaticFile:
    content = files("onward.web.ui").joinpath("static", name).read_bytes()
    suffix = name[name.rindex(".") :]
    return StaticFile(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

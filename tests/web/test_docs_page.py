"""The page for people: whole in itself, and held to that by its own policy."""

import base64
import hashlib
import re

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from onward.web import docs_page


@pytest.fixture
def answer() -> httpx.Response:
    with TestClient(Starlette(routes=[Route(docs_page.PATH, docs_page.show)])) as client:
        return client.get("/docs")


def test_nothing_is_loaded_from_elsewhere(answer: httpx.Response) -> None:
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:https?:)?//[a-z]", answer.text), "no address of another place"
    assert not re.findall(r"\ssrc=|<link|@import|url\(", answer.text)


def test_the_policy_lets_only_this_script_and_this_style_run(answer: httpx.Response) -> None:
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; ") and "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"\son[a-z]+=|\sstyle=", answer.text), "what the policy would not let run"


def test_what_servers_say_is_shown_as_text_only() -> None:
    assert not re.findall(r"innerHTML|outerHTML|document\.write|insertAdjacent|eval\(", docs_page.PAGE)

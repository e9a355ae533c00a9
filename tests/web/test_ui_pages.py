"""The files of `/ui`: complete, held to our own origin, and without any way for text to become script."""

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from onward.clock import SystemClock
from onward.web.auth.api_key_table import ApiKeyTable
from onward.web.auth.authenticator import ActiveKeys, Authenticator, RouteAccess
from onward.web.request_id_middleware import respond_refusal
from onward.web.starlette_app import make_starlette_app
from onward.web.ui import static_files
from onward.web.ui.ui_routes import SESSION_PATH, UiServerInfo, session_route, static_routes
from tests.web.route_access import KEYS, entries, header

STATIC = files("onward.web.ui").joinpath("static")
SOURCES = {name: static_files.read_static_file(name).content.decode() for name in (*static_files.NAMES, "index.html")}
EACH = pytest.mark.parametrize("name", SOURCES)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_starlette_app(static_routes())) as client:
        yield client


def test_every_file_of_the_folder_is_served_and_the_page_loads_no_other() -> None:
    assert {path.name for path in STATIC.iterdir()} == {"index.html", *static_files.NAMES}
    loaded = set(re.findall(r'(?:src|href)="ui/([^"]+)"', SOURCES["index.html"]))
    imported = {name for text in SOURCES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert loaded | imported == set(static_files.NAMES)


@pytest.mark.parametrize("path", sorted(static_files.PATHS))
def test_every_file_has_the_strict_policy_and_is_revalidated(client: TestClient, path: str) -> None:
    response = client.get(path)
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200 and policy.startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; "
    )
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy and "require-trusted-types-for" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    again = client.get(path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@EACH
def test_nothing_is_loaded_from_another_origin(name: str) -> None:
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[a-z][a-z0-9-]*\.", text)
    assert not re.findall(r"@import|url\(", text)


@EACH
def test_no_text_is_parsed_as_html_or_script(name: str) -> None:
    text = SOURCES[name]
    assert not re.findall(
        r"innerHTML|outerHTML|document\.write|insertAdjacent|DOMParser|srcdoc|\beval\(|new Function", text
    )
    assert not re.findall(r"createContextualFragment|setTimeout\(\s*[\"'`]|javascript:", text)
    if name.endswith(".html"):
        assert not re.findall(r"<script(?![^>]*\ssrc=)|<style|\son[a-z]+=|\sstyle=", text), "the policy would refuse it"


def test_all_files_are_open_and_the_session_is_for_holders_of_keys() -> None:
    routes = [*static_routes(), session_route(lambda: UiServerInfo("mixed", serves_clients=True))]
    assert {route.path for route in routes if route.access is RouteAccess.OPEN} == static_files.PATHS
    authenticator = Authenticator(ActiveKeys(ApiKeyTable(entries())), routes, "", SystemClock())
    app = make_starlette_app(routes)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := authenticator.check(scope)) is not None:
            scope["onward.refusal"] = refusal
            await respond_refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    with TestClient(guarded) as client:
        assert client.get("/ui").status_code == 200
        assert client.get(SESSION_PATH).status_code == 401
        told = {name: client.get(SESSION_PATH, headers=header(name)).json() for name in KEYS}
    assert {name: (one["caller"], one["is_admin"]) for name, one in told.items()} == {
        "user": ("user", False),
        "other": ("other", False),
        "admin": ("admin", True),
    }
    assert "hash" not in str(told) and told["user"]["serves_clients"] is True

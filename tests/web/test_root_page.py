"""`/` sends browsers to `/ui`, and says to programs what the server is and nothing about its configuration."""

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from onward.version import __version__
from onward.web import root_page

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_program_gets_json_and_a_browser_is_sent_to_the_ui() -> None:
    with TestClient(Starlette(routes=[Route(root_page.PATH, root_page.show)])) as client:
        told = client.get("/", headers={"accept": "*/*"})
        assert told.json() == {"name": "onward", "version": __version__} | root_page.LINKS
        page = client.get("/", headers={"accept": BROWSER}, follow_redirects=False)
        assert (page.status_code, page.headers["location"]) == (307, "ui"), (
            "relative: the host name is the client's word"
        )
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert client.head("/").status_code == 200

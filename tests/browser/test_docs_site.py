"""The documentation site in a real Chromium: search, pages on a phone, and nothing from another origin."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.chromium import running_chromium, until
from tests.docs.built_site import build_site, pages_by_section

PHONE = {"width": 390, "height": 844}
WIDE_PAGES = ("index", "get-started", "howto/sizing", "reference/flags", "reference/routes", "failure-contract")


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("site")
    built = build_site(folder)
    assert built.returncode == 0, built.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """A tab. It may load from the site only, and nothing may be reported to its console."""
    context = chromium.new_context()
    page = context.new_page()
    requested: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    context.close()
    assert requested and not [address for address in requested if not address.startswith((url, "data:", "blob:"))]
    assert not problems


def test_the_index_shows_the_sections_and_the_animation(page: Page, url: str) -> None:
    page.goto(f"{url}/index.html")
    tabs = [text.strip() for text in page.locator(".md-tabs__link").all_inner_texts()]
    assert tabs == list(pages_by_section())
    image = page.locator("img[src$='stream-survives-kill.svg']")
    until(page, lambda: bool(image.evaluate("image => image.complete && image.naturalWidth > 0")), "the image loads")
    page.click("text=Get started >> nth=0")
    assert page.locator("h1").inner_text().startswith("Get started")


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("--adopt", "reference/flags.html"),
        ("onward_kv_blocks", "reference/metrics.html"),
        ("stuck", "howto/stuck-stream.html"),
    ],
)
def test_search_finds_flags_metrics_and_guides(page: Page, url: str, words: str, address: str) -> None:
    page.goto(f"{url}/index.html")
    page.click(".md-search__input")
    page.keyboard.type(words)
    results = page.locator(".md-search-result__link")
    until(page, lambda: results.count() > 0, "results appear")
    found = [link.get_attribute("href") or "" for link in results.all()]
    assert any(address in link for link in found), found
    page.locator(f".md-search-result__link[href*='{address}']").first.click()
    until(page, lambda: address in page.url, "the page opens")


@pytest.mark.parametrize("name", WIDE_PAGES)
def test_pages_fit_a_phone(page: Page, url: str, name: str) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(f"{url}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("label.md-header__button[for=__drawer]")
    until(page, lambda: page.locator(".md-nav--primary").first.is_visible(), "the menu opens")


def test_the_reader_chooses_dark_or_light(page: Page, url: str) -> None:
    page.goto(f"{url}/index.html")
    before = page.locator("body").get_attribute("data-md-color-scheme")
    page.locator("form[data-md-component=palette] label:visible").click()
    after = page.locator("body").get_attribute("data-md-color-scheme")
    assert {before, after} == {"default", "slate"}

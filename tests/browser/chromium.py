"""A real Chromium for tests: the system's, with a private folder for its files and its own sandbox where there is one."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
POLL_MS = 50


def find_chromium() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    assert found is not None, f"these tests need a Chromium; none of {', '.join(NAMES)} is on PATH"
    return found


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """`--no-sandbox` for root only, for which Chromium has no sandbox."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="onward-browser-") as folder, sync_playwright() as playwright:
        environment = os.environ | {"TMPDIR": folder, "HOME": folder}
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags, env=environment)
        try:
            yield browser
        finally:
            browser.close()


def until(page: Page, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Not by `wait_for_function`, which evaluates a string in the page: the policy forbids that."""
    for _ in range(int(timeout_s * 1000 / POLL_MS)):
        if condition():
            return
        page.wait_for_timeout(POLL_MS)
    raise AssertionError(f"{what} did not happen; the page shows:\n{page.inner_text('body')[:2000]}")

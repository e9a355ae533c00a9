"""A real Chromium for tests, with a private folder for its files and its own sandbox where there is one.

It is the system's, or else the one that scripts/install_chromium.py has put beside the interpreter.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALLED = Path(sys.prefix) / "chromium"
PROGRAM, LIBRARIES = "chromium", "libraries"
POLL_MS = 50


def find_system_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def find_chromium() -> str:
    if (found := find_system_chromium()) is not None:
        return found
    installed = INSTALLED / PROGRAM
    assert installed.exists(), f"none of {', '.join(NAMES)} is on PATH; run `make chromium`"
    return str(installed)


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """`--no-sandbox` for root only, for which Chromium has no sandbox."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="onward-browser-") as folder, sync_playwright() as playwright:
        environment = os.environ | {"TMPDIR": folder, "HOME": folder}
        if (libraries := INSTALLED / LIBRARIES / "lib").exists():
            environment["LD_LIBRARY_PATH"] = f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags, env=environment)
        try:
            yield browser
        finally:
            browser.close()


def until(page: Page, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Not by `wait_for_function`, which evaluates a string in the page: the policy forbids that."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen; the page:\n{page.inner_text('body')[:2000]}"
        page.wait_for_timeout(POLL_MS)

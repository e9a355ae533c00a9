"""Every command on the site is run, as it stands there, or is marked with what it needs."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import pytest

from tests.docs.built_site import ROOT, pages_by_section
from tests.docs.page_commands import blocks_of, script_of

README = ROOT / "README.md"
PAGES = [README, *(ROOT / "docs" / path for paths in pages_by_section().values() for path in paths)]
READ_FIRST = (README, ROOT / "docs" / "get-started.md")
"""The others take minutes together, so `make test-full` runs them."""
PAGES_TO_RUN = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[] if page in READ_FIRST else [pytest.mark.full])
    for page in PAGES
    if page.exists() and any(not block.is_marked for block in blocks_of(page))
]
LINKED = ("Makefile", "benchmarks", "clients", "deploy", "docs", "onward", "pyproject.toml", "scripts")
TIMEOUT_S = 840


def make_checkout(folder: Path) -> None:
    """Makes a folder in which commands find the repository and its virtual environment, and write elsewhere."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)


def free_port() -> str:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("page", PAGES_TO_RUN)
def test_every_command_of_a_page_works(page: Path, tmp_path: Path) -> None:
    make_checkout(tmp_path)
    ports = cache(lambda _: free_port())
    script = script_of(page, ports)
    paths = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    # With a safe path every process imports the package from its own folder: kernels are kept for that path.
    environment = os.environ | {
        "PATH": paths, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "TMPDIR": str(tmp_path)
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, f"{output}\n\n{script}"

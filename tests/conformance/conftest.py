from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.wires import KINDS, WiredHarness

Connect = Callable[..., WiredHarness]


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Makes engines with a worker behind the wire of the test's turn."""
    opened: list[WiredHarness] = []

    def open_one(**shape: object) -> WiredHarness:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        opened.append(WiredHarness(request.param, folder, **shape))
        return opened[-1]

    yield open_one
    for harness in opened:
        harness.close()

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.built_site import BuiltSite, build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltSite]:
    folder: Path = tmp_path_factory.mktemp("site")
    built = build_site(folder)
    assert built.returncode == 0, built.stderr
    yield BuiltSite(folder)

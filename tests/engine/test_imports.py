"""What an engine imports before it can serve. A killed engine costs its clients this time."""

import subprocess
import sys

import pytest

SLOW_PACKAGES = ("asyncio", "prometheus_client", "ssl", "http", "numpy", "torch", "aiohttp")


@pytest.mark.parametrize("module", ["onward.engine.main", "onward.stream_store.main"])
def test_a_process_without_http_imports_nothing_that_is_slow_and_not_needed(module: str) -> None:
    script = f"import sys, {module}; print(*[name for name in {SLOW_PACKAGES} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

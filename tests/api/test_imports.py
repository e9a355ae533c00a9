"""What an api process imports before it serves: each package delays its start, also after it was killed."""

import subprocess
import sys


def test_an_api_process_without_routers_imports_no_http_client() -> None:
    look = "import sys, onward.api.main; print(*sorted({'aiohttp', 'httpx', 'numpy', 'torch'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []

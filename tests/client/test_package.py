"""What importing the package needs and brings."""

import subprocess
import sys

SERVER_PACKAGES = "api engine worker router supervisor web transport proto text grammar models obs config"
LEFT_OUT = "import sys; sys.modules.update({'httpx': None})\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_imports_nothing_of_the_server_and_no_openai() -> None:
    code = "import sys, onward.client\nprint(*{name for name in sys.modules if name.startswith(('onward.', 'openai'))})"
    imported = {name.split(".")[1] if "." in name else name for name in run(code).split()}
    assert imported & {*SERVER_PACKAGES.split(), "openai"} == set()
    assert "client" in imported


def test_without_httpx_the_error_names_the_extra() -> None:
    code = LEFT_OUT + "try:\n  import onward.client\nexcept Exception as fault:\n  print(fault)"
    assert run(code).startswith("onward.client needs httpx, not installed here: install the extra onward[client]")


def test_openai_is_needed_by_its_wrapper_alone() -> None:
    code = (
        "import sys; sys.modules.update({'openai': None})\nfrom onward.client import resume_streams\n"
        "try:\n  resume_streams(None)\nexcept Exception as fault:\n  print(fault)"
    )
    assert run(code).startswith("onward.client.resume_streams needs openai, not installed here: install the extra")

"""The wheel that `make dist` builds has every file of the package and no other one."""

import configparser
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from onward.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGES_AND_SCRIPTS = ("onward/web/docs_page.html", "onward/web/ui/static/index.html", "onward/web/ui/static/app.js")


def build(kind: str, folder: Path) -> Path:
    """As `make dist` does: without a network, and without an installed Onward."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    [file] = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"onward-{__version__}-py3-none-any.whl"
    files = (file for file in (ROOT / "onward").rglob("*") if file.is_file())
    expected = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    packed = {
        name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(f"onward-{__version__}.dist-info/")
    }
    assert packed == expected
    assert packed.issuperset(PAGES_AND_SCRIPTS)


def test_the_wheel_brings_the_command_and_its_license_and_does_not_require_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"onward-{__version__}.dist-info"
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        metadata = archive.read(f"{folder}/METADATA").decode()
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert dict(scripts["console_scripts"]) == {"onward": "onward.cli.main:main"}
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(required) > 10 and not [line for line in required if "torch" in line or "triton" in line]


def test_the_command_runs_from_the_files_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Only the dependencies come from this environment."""
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()

    assert Path(run("-c", "import onward; print(onward.__file__)")).is_relative_to(installed)
    assert run("-m", "onward", "--version") == __version__
    assert run("-m", "onward", "completion", "bash").startswith("#")


def test_the_sdist_has_what_tests_and_deployments_need(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "LICENSE", "README.md", "tests/test_wheel.py", "docs/router.md"} <= names
    assert "mkdocs.yml" in names
    assert {"onward/cli/main.py", "deploy/prometheus/alerts.yml", *PAGES_AND_SCRIPTS} <= names
    assert not [name for name in names if name.startswith((".venv", "dist/", "build/")) or "__pycache__" in name]

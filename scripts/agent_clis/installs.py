"""Installs an agent in a folder of its own. A folder with the same version is used again."""

import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

_MARK = "installed-version"


class Source(Enum):
    NPM = "npm"
    PYPI = "PyPI"


def install(source: Source, package: str, version: str, folder: Path) -> Path:
    """Installs a version of a package from npm or PyPI. Returns the folder of its commands."""
    mark = folder / _MARK
    if not (mark.exists() and mark.read_text() == version):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        match source:
            case Source.NPM:
                _install_from_npm(package, version, folder)
            case Source.PYPI:
                _install_from_pypi(package, version, folder)
        mark.write_text(version)  # last, so that a folder with a mark is complete
    return folder / ("node_modules/.bin" if source is Source.NPM else "venv/bin")


def _install_from_npm(package: str, version: str, folder: Path) -> None:
    (folder / "package.json").write_text('{"private": true}\n')
    # Install scripts link the binary of this platform; the packages of some agents cannot run without them.
    _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}")
    for name in ("install.cjs", "postinstall.mjs"):
        script = folder / "node_modules" / package / name
        if script.exists():
            _run("node", str(script), folder=script.parent)


def _install_from_pypi(package: str, version: str, folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder / "venv"))
    pip = folder / "venv" / "bin" / "pip"
    _run(str(pip), "install", "--quiet", "--disable-pip-version-check", f"{package}=={version}")


def _run(*command: str, folder: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=folder)

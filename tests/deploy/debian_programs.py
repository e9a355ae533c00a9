"""Programs that a few tests need: from PATH, or from Debian's packages, unpacked into the cache folder without root."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from onward.config import cache_dir

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/systemd", "lib/x86_64-linux-gnu", "lib/systemd")
PROGRAMS = ("usr/bin", "usr/sbin", "bin", "sbin")


class Program(NamedTuple):
    path: str
    environment: dict[str, str]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([self.path, *words], env=self.environment, capture_output=True, text=True, timeout=120)


def find_program(name: str, *packages: str) -> Program:
    """`packages`: the program's own, and those of libraries that a plain system lacks."""
    if on_path := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        return Program(on_path, dict(os.environ))
    folder = cache_dir() / "test-tools" / name
    if not folder.exists():
        _unpack(folder, packages)
    [path] = [found for place in PROGRAMS if (found := folder / place / name).exists()][:1]
    libraries = ":".join(str(folder / place) for place in LIBRARIES)
    return Program(str(path), os.environ | {"LD_LIBRARY_PATH": libraries})


def _unpack(folder: Path, packages: tuple[str, ...]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as download:
        subprocess.run(["apt-get", "download", *packages], cwd=download, check=True, capture_output=True)
        unpacked = Path(download) / "unpacked"
        for package in Path(download).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
        unpacked.rename(folder)

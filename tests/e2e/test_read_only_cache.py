"""A cache folder that has everything is enough to serve, also if it cannot be written.

Mode bits do not bind root, which tests may be. So each process refuses, as a read-only file system does, whatever Python
code opens for writing, makes, renames or removes in the folder.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward.config import DEFAULT_MODEL, cache_dir
from onward.models.loader import file_property_cache
from tests.e2e.server import Server

ROOT = Path(__file__).parents[2]
READ_ONLY = """
import errno, os, sys

folder = os.path.realpath(os.environ["READ_ONLY_FOLDER"])
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
changing = {"os.remove", "os.rmdir", "os.rename", "os.chmod", "os.utime", "os.link", "os.symlink", "os.truncate"}

def refuse(event, args):
    if event == "open":
        paths = [args[0]] if args[2] & writing else []
    elif event == "os.mkdir":
        paths = [] if os.path.exists(args[0]) else [args[0]]
    else:
        paths = args if event in changing else []
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(path))
            if os.path.commonpath([folder, path]) == folder:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

sys.addaudithook(refuse)
"""
COMPILE = "from onward.kernels.cpu import threads; threads._compiled_help(); print('compiled')"


def make_read_only(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that are started from now on."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(READ_ONLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    monkeypatch.setenv("READ_ONLY_FOLDER", str(folder))
    tried = subprocess.run([sys.executable, "-c", f"open({str(folder / 'x')!r}, 'w')"], capture_output=True, text=True)
    assert "Read-only file system" in tried.stderr


def warm() -> str:
    command = [sys.executable, "-m", "onward.cli.main", "warm"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stderr


def test_a_complete_cache_that_is_read_only_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm()
    folder = cache_dir()
    for name in ("ONWARD_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder))
    make_read_only(folder, tmp_path / "site", monkeypatch)
    assert "kernel not cached" not in warm()
    with Server() as server:
        body = {"model": DEFAULT_MODEL, "prompt": "The capital of France is", "temperature": 0}
        status, answer = server.post("/v1/completions", body)
        assert status == 200 and "Paris" in answer["choices"][0]["text"]
        assert "converting" not in server.log() and "compiling" not in server.log()
        assert "not cached" not in server.log() and "not kept" not in server.log(), "nothing had to be written"


def test_kernels_that_can_be_kept_nowhere_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("ONWARD_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder))
    make_read_only(folder, tmp_path / "site", monkeypatch)
    ended = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "compiled\n", ended.stderr
    assert "kernel not cached" in ended.stderr


def test_a_fact_that_cannot_be_kept_is_learned_each_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    file = tmp_path / "file"
    file.write_text("content")
    learned = [
        file_property_cache.cached_property_of(file, "name", tmp_path / "cache", lambda path: path.name)
        for _ in range(2)
    ]
    assert learned == ["file", "file"]

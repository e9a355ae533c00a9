"""A wheel, a new virtual environment and an empty folder: Onward is installed, fetches its model, serves and answers."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from onward.version import __version__
from tests.test_wheel import build

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

INSTALL_TIMEOUT_S = 1500.0
"""Packages come from an index, and models and kernels are made anew."""
CHAT = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "temperature": 0,
    "max_tokens": 20,
}


def environment(folder: Path) -> dict[str, str]:
    """Nothing of this checkout, and no cache of ours. The settings of pip are those of the machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ONWARD_", "VIRTUAL_"))}
    return kept | {"ONWARD_CACHE": str(folder / "cache"), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "xdg")}


def test_the_wheel_alone_serves_a_chat(tmp_path: Path) -> None:
    dist, empty = tmp_path / "dist", tmp_path / "empty"
    dist.mkdir()
    empty.mkdir()
    wheel = build("wheel", dist)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    env = environment(tmp_path)

    def in_venv(*command: str) -> str:
        ended = subprocess.run(
            [str(venv / "bin" / command[0]), *command[1:]],
            cwd=empty,
            env=env,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    in_venv("pip", "install", "-q", str(wheel))
    assert in_venv("onward", "--version").strip() == __version__
    assert in_venv("python", "-m", "onward", "--version").strip() == __version__
    assert not re.search(r"^(torch|triton)\b", in_venv("pip", "list"), re.MULTILINE)

    server = subprocess.Popen(
        [str(venv / "bin" / "onward"), "serve", "--port", "0"],
        cwd=empty,
        env=env | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(INSTALL_TIMEOUT_S, server.kill)
    watchdog.start()
    try:
        assert server.stdout is not None
        found = next((match for line in server.stdout if (match := re.search(r"at (http://\S+)", line))), None)
        assert found is not None, "the server did not start"
        body = json.dumps(CHAT).encode()
        request = urllib.request.Request(found[1] + "/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert "Paris" in answer["choices"][0]["message"]["content"]
        with urllib.request.urlopen(found[1] + "/ui", timeout=30) as response:
            assert b"<html" in response.read()
        server.terminate()
        assert server.wait(60) == 0
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
        server.stdout.close()
    doctor = json.loads(in_venv("onward", "doctor", "--json", "--port", "0"))
    assert doctor["can_serve"] is True
    assert not [
        check
        for check in doctor["checks"]
        if check["name"] in ("packages", "cache", "default model") and check["advice"]
    ]
    assert not list(empty.iterdir())

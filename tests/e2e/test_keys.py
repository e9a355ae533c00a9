"""A real server with keys: which requests it accepts, keys that are read again, and that no key can be read anywhere."""

import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from onward.cli.main import run
from tests.e2e.server import Server

PATIENCE_S = 30.0


def status(server: Server, path: str, key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def added(path: Path, name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert run(["keys", "add", str(path), name, *flags]) == 0
    return capsys.readouterr().out.strip()


def wait_for_line(server: Server, pattern: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not re.search(pattern, server.log()):
        assert server.is_running and time.monotonic() < deadline_s, server.log()
        time.sleep(0.05)


def test_keys_close_a_real_server_and_are_read_again_and_shown_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plain = tmp_path / "keys.toml", tmp_path / "plain"
    admin = added(path, "boss", capsys, "--role", "admin")
    plain.write_text("ow-of-a-file\n")
    plain.chmod(0o600)
    flags = ("--api-keys", str(path), "--api-key-file", str(plain), "--api-processes", "2")
    with Server("--max-num-seqs", "4", "--num-kv-blocks", "64", *flags) as server:
        assert [status(server, one) for one in ("/live", "/health", "/v1/models", "/info")] == [200, 200, 401, 401]
        assert [status(server, "/v1/models", key) for key in (admin, "ow-of-a-file", "ow-wrong")] == [200, 200, 401]
        user = added(path, "team", capsys)
        server._process.send_signal(signal.SIGHUP)
        wait_for_line(server, "action=reload_keys targets=3")
        deadline_s = time.monotonic() + PATIENCE_S
        while {status(server, "/v1/models", user) for _ in range(8)} != {200}:
            assert time.monotonic() < deadline_s, "an api process has not heard of it"
        assert status(server, "/info", user) == 403
        path.write_text("[[key]]\n")
        server._process.send_signal(signal.SIGHUP)
        wait_for_line(server, "refused=")
        assert status(server, "/v1/models", user) == 200
        request = urllib.request.Request(server.url + "/info", headers={"Authorization": f"Bearer {admin}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            info = response.read().decode()
        pids = [int(pid) for pid in re.findall(r'"pid":(\d+)', info)]
        command_lines = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
        assert len(pids) >= 5 and server.stop() == 0
        for secret in (admin, user, "ow-of-a-file"):
            assert all(secret not in text for text in (info, command_lines, server.log()))

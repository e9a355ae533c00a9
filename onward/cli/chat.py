"""`onward chat`: a conversation in the terminal, with a server or with a model in this process.

If standard input is not a terminal, each line is a question, and only the answers go to standard output.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console

from onward.cli.api_keys import add_api_key_file, api_key_from_args
from onward.cli.chat_backends import ChatBackend, ChatOptions, Messages, OfflineChatBackend, ServerChatBackend
from onward.cli.progress import ProgressDisplay
from onward.config import DEFAULT_MODEL
from onward.errors import OnwardError

HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, /quit leaves; Ctrl-C stops an answer"
MIN_TOKENS_FOR_A_RATE = 8
"""No rate is shown for fewer tokens: some come in one piece, and the end token is not shown, so too few are left to
measure."""
# The text of a model must not move the cursor or recolour the terminal.
_HARMLESS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

ReadLine = Callable[[], str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server [%(default)s]")
    parser.add_argument("--offline", action="store_true", help="load the model into this process; no server is needed")
    parser.add_argument(
        "--model", metavar="MODEL", help="model name at the server, or with --offline the model to load"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_api_key_file(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum length of an answer (default: as many tokens as fit)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.3, metavar="T", help="sampling temperature; 0 is greedy [0.3]"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the sampling; the same seed gives the same answers"
    )


def run(args: argparse.Namespace) -> int:
    options = ChatOptions(args.max_tokens, args.temperature, args.seed)
    console = Console(stderr=True, highlight=False)
    if args.offline:
        backend = _offline(args.model, options, console)
    else:
        backend = ServerChatBackend(args.url, args.model, options, api_key_from_args(args))
    chat = ChatSession(backend, sys.stdout, console, args.system)
    if not sys.stdin.isatty():
        return chat.run(_lines_of(sys.stdin))
    console.print(f"{backend.name}  [dim]{HELP}[/dim]")
    return chat.run(_prompted())


def _offline(model: str | None, options: ChatOptions, console: Console) -> ChatBackend:
    from onward.llm import LLM

    with ProgressDisplay(console) as progress:
        llm = LLM(model or DEFAULT_MODEL, progress=progress)
    return OfflineChatBackend(llm, options)


class ChatSession:
    """The conversation so far. Handles the lines that the user enters."""

    def __init__(self, backend: ChatBackend, out: TextIO, console: Console, system: str | None = None) -> None:
        self._backend, self._out, self._console = backend, out, console
        self._system = system
        self._history: Messages = []
        self._num_failed = 0

    def run(self, read_line: ReadLine) -> int:
        """Runs until the user leaves. Returns 1 if any question was left without an answer."""
        while True:
            try:
                line = read_line()
            except KeyboardInterrupt:
                self._console.print("\n/quit leaves", style="dim")
                continue
            if line is None or line.strip() == "/quit":
                return 1 if self._num_failed else 0
            self._handle_line(line.strip())

    def _handle_line(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/clear":
            self._history.clear()
            self._console.print("forgotten", style="dim")
        elif command == "/system":
            self._system = rest.strip() or None
            self._console.print("system prompt set" if self._system else "no system prompt", style="dim")
        elif command.startswith("/") and command[1:].isalpha():
            self._console.print(f"no such command; {HELP}", style="dim", markup=False)
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        system: Messages = [{"role": "system", "content": self._system}] if self._system else []
        new_messages: Messages = [{"role": "user", "content": question}]
        answer = StreamedReply(self._out)
        try:
            answer.follow(self._backend, [*system, *self._history, *new_messages])
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        except OnwardError as error:
            self._num_failed += 1
            self._console.print(f"\n{error.message}", style="red", markup=False, soft_wrap=True)
            if error.code == "context_length_exceeded" or "context" in error.message:
                self._console.print("/clear begins a new conversation", style="dim")
            return
        print(file=self._out, flush=True)
        if answer.text:
            self._history += [*new_messages, {"role": "assistant", "content": answer.text}]
        if speed := answer.speed():
            self._console.print(speed, style="dim")


class StreamedReply:
    """Prints one answer as it arrives, and measures its time."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._texts: list[str] = []
        self._num_tokens: int | None = None
        self._sent_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._sent_s

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def follow(self, backend: ChatBackend, messages: Messages) -> None:
        for delta in backend.stream_reply(messages):
            self._num_tokens = delta.num_tokens if delta.num_tokens is not None else self._num_tokens
            if delta.text:
                self._last_s = time.monotonic()
                self._first_s = self._first_s or self._last_s
                self._texts.append(delta.text)
                print(delta.text.translate(_HARMLESS), end="", file=self._out, flush=True)

    def speed(self) -> str | None:
        """Returns the speed as text, or None if the number of tokens is not known."""
        if self._num_tokens is None or self._first_s is None:
            return None
        plural = "" if self._num_tokens == 1 else "s"
        first = f"{self._num_tokens} token{plural}, the first after {self._first_s - self._sent_s:.2f} s"
        if self._num_tokens < MIN_TOKENS_FOR_A_RATE or self._last_s <= self._first_s:
            return first
        return f"{first}, then {(self._num_tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s"


def _prompted() -> ReadLine:
    import readline  # noqa: F401  (gives `input` its line editing and history)

    def read_line() -> str | None:
        try:
            return input("\n> ")
        except EOFError:
            print()
            return None

    return read_line


def _lines_of(file: TextIO) -> ReadLine:
    lines: Iterator[str] = iter(file)
    return lambda: next(lines, None)

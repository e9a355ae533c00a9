"""Asks a child process whether a grammar can be compiled within limits, before any other process compiles it.

A child is started at the first question and lives until a grammar exceeds its limits and kills it. The next child is
then started before the answer is returned. Answers are remembered, including deaths, so the same grammar does not kill
two children. A child exits with its parent, whose socket closes. There are several children, so that a grammar that
takes seconds does not delay another caller's; each is started when it is needed.
"""

import contextlib
import hashlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from onward.errors import Unavailable
from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.grammar_limits import COMPILE_BYTES, COMPILE_CPU_S
from onward.grammar.length_prefixed import receive_frame, send_frame
from onward.proto.sampling_params import Grammar

ANSWER_TIMEOUT_S = 20.0
"""For one answer, whatever else the machine does. A child that is started has as long to be ready."""
MAX_REMEMBERED = 1024
MAX_ATTEMPTS = 2
"""Attempts at one question: a child that died of another cause is started again."""

TOO_SLOW = f"it takes more than {COMPILE_CPU_S} s to compile"
TOO_LARGE = f"compiling it takes more than {COMPILE_BYTES >> 20} MB, or it is nested too deeply"
_EXTERNAL_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}

_PLAIN = msgspec.msgpack.encode(Grammar("json_object"))
_decoder = msgspec.msgpack.Decoder(str | None)


@dataclass(slots=True)
class CheckerChild:
    process: "subprocess.Popen[bytes]"
    peer: socket.socket


class CheckerDied(Exception):
    """It has not answered."""

    def __init__(self, problem: str | None) -> None:
        super().__init__(problem)
        self.problem = problem
        """The problem of the grammar, if the grammar caused the death."""


class GrammarChecker:
    """A pool of checker processes that threads share: each process answers one question at a time."""

    def __init__(self, tokenizer_spec: str, num_processes: int = 1) -> None:
        self._checkers = [GrammarCheckerProcess(tokenizer_spec) for _ in range(num_processes)]
        self._idle: queue.LifoQueue[GrammarCheckerProcess] = queue.LifoQueue()
        for checker in self._checkers:
            self._idle.put(checker)
        self._remembered: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidGrammar`."""
        encoded = msgspec.msgpack.encode(grammar)
        key = hashlib.blake2b(encoded, digest_size=16).digest()
        with self._lock:
            is_known, problem = key in self._remembered, self._remembered.get(key)
        if not is_known:
            problem = self._ask_idle_process(encoded)
            self._remember(key, problem)
        if problem is not None:
            raise InvalidGrammar(problem)

    def close(self) -> None:
        for checker in self._checkers:
            checker.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children."""
        return [checker.pid for checker in self._checkers if checker.pid is not None]

    def _ask_idle_process(self, encoded: bytes) -> str | None:
        process = self._idle.get()
        try:
            return process.check(encoded)
        finally:
            self._idle.put(process)

    def _remember(self, key: bytes, problem: str | None) -> None:
        with self._lock:
            self._remembered[key] = problem
            while len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)


class GrammarCheckerProcess:
    """A child process that answers one question at a time."""

    def __init__(self, tokenizer_spec: str) -> None:
        self._spec = tokenizer_spec
        self._child: CheckerChild | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._end_child()

    @property
    def pid(self) -> int | None:
        """Process id of the running child; None if there is none."""
        return None if self._child is None else self._child.process.pid

    def check(self, encoded: bytes) -> str | None:
        """Returns the problem of the grammar, or None if it can be compiled."""
        with self._lock:
            return self._ask(encoded)

    def _ask(self, encoded: bytes) -> str | None:
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._ask_once(encoded)
            except CheckerDied as lost:
                if lost.problem is not None:
                    self._replace_child()
                    return lost.problem
        raise Unavailable("the process that compiles grammars cannot be kept alive", code="grammars_unavailable")

    def _replace_child(self) -> None:
        """Waits until the next child answers, which takes about a second. The caller whose grammar killed the child
        pays for that; otherwise another caller's question could."""
        with contextlib.suppress(CheckerDied):
            self._ask_once(_PLAIN)

    def _ask_once(self, encoded: bytes) -> str | None:
        if self._child is None:
            self._child = self._start()
        peer = self._child.peer
        try:
            send_frame(peer, encoded)
            reply = receive_frame(peer)
        except TimeoutError:
            self._end_child()
            raise CheckerDied(TOO_SLOW) from None
        except OSError:
            reply = None
        if reply is None:
            raise CheckerDied(_problem_of_exit(self._end_child()))
        return _decoder.decode(reply)

    def _start(self) -> CheckerChild:
        parent_end, child_end = socket.socketpair()
        with child_end:
            parent_end.settimeout(ANSWER_TIMEOUT_S)
            command = [sys.executable, "-m", "onward.grammar.checker_process", "--fd", str(child_end.fileno())]
            # The child's last messages are about memory that it did not get, and do not help in a log.
            devnull = subprocess.DEVNULL
            process = subprocess.Popen(
                command, pass_fds=[child_end.fileno()], stdin=devnull, stdout=devnull, stderr=devnull
            )
        child = CheckerChild(process, parent_end)
        try:
            send_frame(parent_end, self._spec.encode())
        except OSError:
            self._child = child
            self._end_child()
            raise CheckerDied(None) from None
        return child

    def _end_child(self) -> int | None:
        """Ends the child process and returns its exit status, or None if there is no child. Closing its socket lets the
        child exit by itself. A child that still runs after a second is killed, and its status is that of `SIGKILL`."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.peer.close()
        try:
            return child.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            return -signal.SIGKILL


def _problem_of_exit(status: int | None) -> str | None:
    if status == -signal.SIGXCPU:
        return TOO_SLOW
    return None if status is None or status in _EXTERNAL_SIGNALS else TOO_LARGE

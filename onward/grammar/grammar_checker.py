"""Asks a child process whether a grammar can be compiled at a bearable price, before anybody else compiles it.

A child is started at the first question and lives until it is killed by a grammar that is too much; then the next one is
started before the answer is given. Answers are remembered, and so is a death: the same grammar does not kill two. A child
goes when we do, since its socket closes. There are several, so that a grammar that takes seconds does not delay another
caller's; a further one is started when it is needed.
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
"""For one question: who was killed by somebody else is started again."""

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
        """What that says of the grammar, if it is the grammar's doing."""


class GrammarChecker:
    """Threads may share them: so many questions are answered at a time."""

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
        """Of the children that there are."""
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
    """One question is answered at a time."""

    def __init__(self, tokenizer_spec: str) -> None:
        self._spec = tokenizer_spec
        self._child: CheckerChild | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._end_child()

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return None if self._child is None else self._child.process.pid

    def check(self, encoded: bytes) -> str | None:
        """What is wrong with the grammar. None: it can be compiled."""
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
        """The caller whose grammar has ended the child waits until the next one answers, which takes about a second. Else
        the next question would, and that may be another caller's."""
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
            # Its last words are about memory it did not get, and of no use in a log.
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
        """How it ended, if it had ended by itself."""
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

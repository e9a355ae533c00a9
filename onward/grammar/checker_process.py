"""The process that compiles unknown grammars, under limits of processor time and memory that kill it.

It first receives the tokenizer, then one grammar at a time, and answers with the problem of each, if any. If a grammar
exceeds the limits, the process dies.
"""

import argparse
import math
import resource
import signal
import socket
import threading
from pathlib import Path

import msgspec

from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.grammar_limits import COMPILE_BYTES, COMPILE_CPU_S
from onward.grammar.length_prefixed import receive_frame, send_frame
from onward.proto.sampling_params import Grammar
from onward.text.tokenizer import Tokenizer

STACK_BYTES = 2 << 20
"""Less than any thread has that compiles in earnest: what is nested too deeply for them ends this one first."""

_decoder = msgspec.msgpack.Decoder(Grammar)


def serve(peer: socket.socket) -> None:
    spec = receive_frame(peer)
    if spec is None:
        return
    # None is kept: what a grammar costs here is what it costs by itself.
    compiler = GrammarCompiler(Tokenizer(spec.decode()), max_compiled=0)
    _compile_problem(
        compiler, Grammar("json_object")
    )  # so that what the library sets up once is not the first one's to pay for
    _limit_memory()
    while (frame := receive_frame(peer)) is not None:
        grammar = _decoder.decode(frame)
        _limit_time()
        send_frame(peer, msgspec.msgpack.encode(_compile_problem(compiler, grammar)))


def _compile_problem(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    try:
        compiler.check(grammar)
    except InvalidGrammar as error:
        return str(error)
    return None


def _limit_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = math.ceil(usage.ru_utime + usage.ru_stime)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + COMPILE_CPU_S, hard))


def _limit_memory() -> None:
    """Limits memory where the operating system reports the current use; elsewhere only time is limited."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + COMPILE_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.grammar.checker_process")
    parser.add_argument("--fd", type=int, required=True)
    peer = socket.socket(fileno=parser.parse_args().fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(peer,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

"""A server that runs for as long as a command needs it: `onward serve` as a child process, with a key that only the two
know."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.cli.ready_message import READY_LINE_PREFIX
from onward.config import API_KEY_VARIABLE, environment_with
from onward.errors import StartupError
from onward.transport.control_channel import exit_with_parent

STOP_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class TemporaryServer:
    url: str
    api_key: str


@contextlib.contextmanager
def temporary_server(flags: Sequence[str]) -> Iterator[TemporaryServer]:
    """Starts a server and stops it at the end. `flags` are flags of `onward serve`. The server listens on this machine
    only, and logs to our standard error."""
    key, own_pid = secrets.token_hex(16), os.getpid()
    command = [sys.executable, "-m", "onward.cli.main", "serve", *flags, "--host", "127.0.0.1", "--port", "0"]
    child = subprocess.Popen(
        command,
        env=environment_with({API_KEY_VARIABLE: key, "COLUMNS": "500"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        process_group=0,
        preexec_fn=lambda: exit_with_parent(own_pid),  # no thread runs here, so it is safe
    )
    with child:
        try:
            yield TemporaryServer(_ready_at(child), key)
        finally:
            _stop(child)


def _ready_at(child: "subprocess.Popen[bytes]") -> str:
    """Waits for the ready message and returns its URL. A server that cannot start logs the reason itself, and exits."""
    assert child.stdout is not None
    for line in child.stdout:
        text = line.decode(errors="replace")
        if text.startswith(READY_LINE_PREFIX) and (match := re.search(r" at (https?://\S+)", text)):
            return match[1]
    raise StartupError("the server did not start; its own words are above")


def _stop(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()

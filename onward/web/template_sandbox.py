"""Renders a client's chat template in another process, with limits on time, memory and output that no template can
evade.

Counting the steps of a template (`text.bounded_template`) is enough for a template that the operator has chosen. A
hostile template can do an hour's work, or fill all memory, in a single step, for example by comparing two lists that
contain each other a hundred times over. Only the operating system can stop that. The cost is about 6 ms, for a fork and
for compiling the template.
"""

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time

import msgspec

from onward.errors import InvalidRequest
from onward.web.template_sandbox_child import MAX_FRAME_BYTES, PREFIX_BYTES, RenderJob, RenderResult, frame

MAX_TEMPLATE_CHARS = 64 << 10

_ANSWER_WITHIN_S = 5.0
"""Wall-clock time for one second of processor time on a busy machine."""
_STARTED_WITHIN_S = 30.0
_READ_BYTES = 1 << 20


class TemplateSandboxPool:
    """Several sandboxes, so that a template that takes a second does not delay another caller's. The process of each is
    started when it is first needed."""

    def __init__(self, num_sandboxes: int) -> None:
        self._sandboxes = [TemplateSandbox() for _ in range(num_sandboxes)]
        self._idle: queue.LifoQueue[TemplateSandbox] = queue.LifoQueue()
        for sandbox in self._sandboxes:
            self._idle.put(sandbox)

    def render(self, job: RenderJob) -> str:
        """Renders a template like `TemplateSandbox.render`, and returns the text. Blocks until a sandbox is idle."""
        sandbox = self._idle.get()
        try:
            return sandbox.render(job)
        finally:
            self._idle.put(sandbox)

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()


class TemplateSandbox:
    """Renders one template at a time, each in its own process. The child that forks these processes is started for the
    first template."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._decoder = msgspec.msgpack.Decoder(RenderResult)

    def render(self, job: RenderJob) -> str:
        """Returns the rendered prompt. Blocks, so it has to be called from a thread. If rendering fails, raises an
        `InvalidRequest` that names `chat_template` and the reason."""
        if len(job.source) > MAX_TEMPLATE_CHARS:
            raise _refused(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        with self._lock:
            result = self._render_in_child(frame(job))
        if result.text is None:
            raise _refused(result.error)
        return result.text

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _render_in_child(self, request: bytes) -> RenderResult:
        try:
            child, timeout_s = self._running_child()
            assert child.stdin is not None and child.stdout is not None
            deadline_at_s = time.monotonic() + timeout_s
            _write(child.stdin.fileno(), request, deadline_at_s)
            length = int.from_bytes(_read(child.stdout.fileno(), PREFIX_BYTES, deadline_at_s), "little")
            if length > MAX_FRAME_BYTES:
                raise TimeoutError
            return self._decoder.decode(_read(child.stdout.fileno(), length, deadline_at_s))
        except (OSError, msgspec.DecodeError):  # a TimeoutError is an OSError
            self._end_child()
            return RenderResult(error="it took too long, or ended the process that rendered it")

    def _running_child(self) -> "tuple[subprocess.Popen[bytes], float]":
        if self._child is not None and self._child.poll() is None:
            return self._child, _ANSWER_WITHIN_S
        self._end_child()
        # The child inherits nothing of this process: no keys in the environment, no sockets, not even the folder.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "onward.web.template_sandbox_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd="/",
            start_new_session=True,
        )
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return self._child, _STARTED_WITHIN_S

    def _end_child(self) -> None:
        """Kills the child with all processes that it has forked."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with child:
            child.kill()


def _write(fd: int, data: bytes, deadline_at_s: float) -> None:
    view = memoryview(data)
    while view:
        if not select.select([], [fd], [], _remaining_s(deadline_at_s))[1]:
            raise TimeoutError
        view = view[os.write(fd, view[:_READ_BYTES]) :]


def _read(fd: int, num_bytes: int, deadline_at_s: float) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        if not select.select([fd], [], [], _remaining_s(deadline_at_s))[0]:
            raise TimeoutError
        part = os.read(fd, min(num_bytes, _READ_BYTES))
        if not part:
            raise BrokenPipeError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _remaining_s(deadline_at_s: float) -> float:
    return max(0.0, deadline_at_s - time.monotonic())


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"chat_template: {reason}", param="chat_template")

"""The child process of `template_sandbox`: renders each template in a process of its own that cannot do anything else.

Imports are done once, and the process forks for each job. The fork limits its own time, memory, files and processes,
renders, and exits. So no state of one job is left for the next, and whatever a template does to its process, this one
only sees the exit status.
"""

import os
import resource
import sys

import msgspec

from onward.errors import OnwardError
from onward.text.chat_template import ChatTemplate

MAX_FRAME_BYTES = 256 << 20
PREFIX_BYTES = 8


_WARM_UP_TEMPLATES = (
    "{% for m in messages %}{{ m.content | tojson }}{{ strftime_now('%d %b %Y') }}{% endfor %}",
    "{% if %}",
    "{{ 1 / 0 }}",
    "{{ missing.attribute }}",
    "{{ 'x'.__class__ }}",
)
"""Rendered once before the first job, because they import something or fail in different ways: a fork cannot open any
file, not even a module's."""


class RenderJob(msgspec.Struct, frozen=True):
    source: str
    messages: list[dict[str, object]]
    created_s: float
    bos_token: str | None = None
    eos_token: str | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, object]] | None = None
    variables: dict[str, object] = {}
    max_chars: int = 1 << 20
    max_cpu_s: int = 1
    max_memory_bytes: int = 512 << 20


class RenderResult(msgspec.Struct, frozen=True):
    text: str | None = None
    error: str = ""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def main() -> None:
    for source in _WARM_UP_TEMPLATES:
        _render(RenderJob(source, [{"content": "é"}], 0.0))
    decoder = msgspec.msgpack.Decoder(RenderJob)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while len(prefix := stdin.read(PREFIX_BYTES)) == PREFIX_BYTES:
        job = decoder.decode(stdin.read(int.from_bytes(prefix, "little")))
        stdout.write(_render_in_fork(job))
        stdout.flush()


def _render_in_fork(job: RenderJob) -> bytes:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _render_and_exit(job, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        result = pipe.read(MAX_FRAME_BYTES)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return frame(RenderResult(error=f"it takes more than {job.max_cpu_s} s, or more memory than it may"))
    return result


def _render_and_exit(job: RenderJob, write_end: int) -> None:
    code = 1
    try:
        _drop_privileges(job)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(frame(_render(job)))
        code = 0
    finally:
        os._exit(code)  # in any case: the fork must not continue as if it were its parent


def _drop_privileges(job: RenderJob) -> None:
    limits = {
        resource.RLIMIT_CPU: job.max_cpu_s,
        resource.RLIMIT_AS: job.max_memory_bytes,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limit_name, limit in limits.items():
        resource.setrlimit(limit_name, (limit, limit))


def _render(job: RenderJob) -> RenderResult:
    try:
        template = ChatTemplate(job.source, job.bos_token, job.eos_token, max_chars=job.max_chars)
        text = template.render(
            job.messages,
            created_s=job.created_s,
            add_generation_prompt=job.add_generation_prompt,
            tools=job.tools,
            variables=job.variables,
        )
        return RenderResult(text)
    except OnwardError as error:
        return RenderResult(error=error.message[:1000])
    except (MemoryError, RecursionError):
        return RenderResult(error="it needs more memory than it may")


if __name__ == "__main__":
    main()

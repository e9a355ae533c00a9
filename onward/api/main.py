"""An api process: `python -m onward.api.main --control-fd N`, started by the supervisor and never by hand.

Provides what `process` gets passed in: the event loop, the listening socket, process exit.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvloop

from onward import log
from onward.api.process import ApiProcess, Runtime
from onward.api.requests.preprocessing_executors import TEMPLATE_LIMITS
from onward.api.requests.text_processor import TextProcessor
from onward.clock import SystemClock
from onward.config import OtelSettings
from onward.errors import OnwardError
from onward.obs.span_exporter import import_exporter
from onward.obs.tracer import resolve_settings
from onward.proto.control import StartApi, StartFailed
from onward.random_source import SystemRandomSource
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.transport.control_channel import ControlChannel, join_supervisor_as
from onward.transport.stream_store_sockets import StreamStoreClientSocket
from onward.transport.zmq_sockets import EngineClientSocket
from onward.web.server.connection_tracker import ConnectionLimits
from onward.web.server.http_server import HttpServer
from onward.web.server.tls_files import tls_files
from onward.web.template_sandbox import TemplateSandboxPool

if TYPE_CHECKING:
    import aiohttp

M_MMAP_THRESHOLD = -3
"""The constant's value in `malloc.h`."""
LARGE_BYTES = 1 << 20
_THREAD_SWITCH_INTERVAL_S = 0.0005
"""How long the event loop waits for the GIL while a thread decodes or tokenizes. Python's default of 5 ms would delay each
token."""


async def _serve(
    start: StartApi, channel: ControlChannel, text_processor: TextProcessor, otel: OtelSettings | None
) -> None:
    runtime = Runtime(
        clock=SystemClock(),
        random=SystemRandomSource(),
        connect_engine=lambda address: EngineClientSocket(address, start.incarnation),
        connect_stream_store=lambda address: StreamStoreClientSocket(address, start.incarnation),
        new_session=_new_session,
        new_executor=lambda num_threads, name: ThreadPoolExecutor(num_threads, thread_name_prefix=name),
        stop_server=lambda grace_s, on_end: server.stop(grace_s, on_end),
        exit_now=_exit_now,
        otel=otel,
    )
    api = ApiProcess(start, channel, text_processor, runtime)
    limits = ConnectionLimits(max_connections=start.config.max_connections)
    server = HttpServer(api.app, api.on_listening, tls=tls_files(start.config), limits=limits, registry=api.registry)
    loop = asyncio.get_running_loop()
    loop.add_reader(channel.fileno(), api.read_control)
    try:
        if start.awaits_turn:
            await api.wait_for_turn()
        await server.serve([socket.socket(fileno=start.listen_fd)])
    finally:
        loop.remove_reader(channel.fileno())
        await api.close()


def _new_session() -> "aiohttp.ClientSession":
    import aiohttp  # a fifth of a second, and only instances with routers need it

    return aiohttp.ClientSession()


def _exit_now() -> None:
    logging.shutdown()
    os._exit(1)


def _return_large_buffers() -> None:
    """Makes malloc return large buffers, such as bodies of megabytes, to the operating system when they are freed. By
    default glibc raises this threshold to the largest buffer that it has seen, and each thread's heap then keeps such
    buffers."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def main() -> None:
    channel, start = join_supervisor_as(StartApi)
    log.configure(f"api-{start.index}", start.config.log_level, start.config.log_format)
    try:
        sandboxes = TemplateSandboxPool(TEMPLATE_LIMITS.running) if start.config.trust_request_chat_template else None
        config = start.config
        text_processor = TextProcessor(
            read_tokenizer_files(start.model),
            sandboxes,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            max_tokens=start.model.config.max_position_embeddings,
        )
    except OnwardError as error:
        channel.send(StartFailed(error.message))
        raise SystemExit(1) from error
    otel = resolve_settings(start.config.otlp_endpoint, start.config.trace_sample_ratio)
    if otel is not None:
        import_exporter()
    _return_large_buffers()
    sys.setswitchinterval(_THREAD_SWITCH_INTERVAL_S)
    # The objects that exist now are never freed. A garbage collection that traverses the tokenizer's tables would delay
    # every stream.
    gc.collect()
    gc.freeze()
    uvloop.run(_serve(start, channel, text_processor, otel))
    text_processor.grammar_validator.close()
    channel.close()


if __name__ == "__main__":
    main()

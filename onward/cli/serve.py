"""`onward serve`: one instance on this machine. Prepares the model, then supervises until it is told to stop."""

import argparse
import logging
import signal
import socket
import sys
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from onward import log
from onward.cli.flags import add_flags, from_args
from onward.cli.progress import StartProgress
from onward.clock import SystemClock
from onward.config import ServeConfig, cache_dir
from onward.errors import StartupError
from onward.models import store
from onward.proto.model import PreparedModel
from onward.supervisor.supervisor import Supervisor

BACKLOG = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser, ServeConfig)


def run(args: argparse.Namespace) -> int:
    config: ServeConfig = from_args(args, ServeConfig)
    if args.model_argument:
        config = replace(config, model=args.model_argument)
    check(config)
    log.set_up("supervisor", config.log_level)
    listening = listen(config.host, config.port)
    signal.signal(signal.SIGTERM, _leave_quietly)
    with listening, StartProgress(Console(stderr=True)) as progress:
        model = prepare_model(config, progress)
        supervisor = Supervisor(
            config,
            model,
            listening,
            SystemClock(),
            on_progress=progress.say,
            on_ready=lambda: _welcome(progress, model, listening),
        )
        supervisor.run()
    logging.getLogger(__name__).info("stopped")
    return 0


def prepare_model(config: ServeConfig, progress: StartProgress) -> PreparedModel:
    return store.prepare(
        config.model,
        served_model_name=config.served_model_name,
        dtype=config.dtype,
        quantization=config.quantization,
        load_format=config.load_format,
        cache_dir=cache_dir(),
        progress=progress,
    )


def check(config: ServeConfig) -> None:
    """What can be seen to be wrong before anything is loaded."""
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_queue", "api_processes"):
        if getattr(config, name) < 1:
            raise StartupError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("num_kv_blocks", "max_model_len", "threads"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise StartupError(f"--{name.replace('_', '-')} must be at least 1")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise StartupError(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}): every running request needs a token per step"
        )


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as fault:
        sock.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {fault.strerror}; choose another --port, or stop what uses this one"
        ) from fault
    return sock


def _leave_quietly(_number: int, _frame: object) -> None:
    sys.exit(0)


def _welcome(progress: StartProgress, model: PreparedModel, listening: socket.socket) -> None:
    progress.stop()
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    # A small model left to chance talks without end, so the first request that people try is kept short and calm.
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{model.name}", "messages": [{message}], "temperature": 0.2, "max_tokens": 100}}'
    console = Console(highlight=False)
    console.print(Text.assemble("\n  Onward serves ", (model.name, "bold"), " at ", (url, "bold cyan"), "\n"))
    console.print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n       -d '{body}'\n",
        soft_wrap=True,
        markup=False,
    )

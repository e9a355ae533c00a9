"""`onward serve`: one instance on this machine. Prepares the model, then supervises the processes until a signal stops
it."""

import argparse
import errno
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from onward import log
from onward.cli import flag_groups
from onward.cli.api_keys import check_demo, check_exposure, exposure_warnings, key_source_from_config
from onward.cli.flag_checks import (
    check_allowed_hosts,
    check_batches,
    check_counts,
    check_instance_name,
    check_log_level,
    check_model_names,
    check_node_name,
    check_not_empty,
    check_not_negative,
    check_origins,
    check_port,
    check_tracing,
)
from onward.cli.flags import add_grouped_flags, from_args
from onward.cli.progress import ProgressDisplay
from onward.cli.ready_message import print_ready
from onward.cli.start_summary import chat_disabled, pool_warning, summary, threads_warning
from onward.clock import SystemClock
from onward.config import BLOCK_MULTIPLE, ServeConfig, cache_dir
from onward.engine.recording.recording_file import check_recording
from onward.errors import StartupError
from onward.models.loader import cuda_probe, model_store
from onward.models.loader.model_lock import hold_model
from onward.obs.step_log import check_step_log
from onward.optional_packages import require_torch
from onward.proto.model import PreparedModel
from onward.proto.rank import MAX_RANKS
from onward.proto.speculative_config import parse_speculative
from onward.proto.step import WorkerHello
from onward.supervisor.cluster_key import read_key
from onward.supervisor.pd_config import (
    PdConfig,
    check_pd,
    handoff_port_to_open,
    pd_warnings,
    prefill_peers_of,
    resolve_pd,
)
from onward.supervisor.predecessor import Predecessor, find_predecessor
from onward.supervisor.registration_config import RegistrationConfig, check_routers, http_url, resolve_registration
from onward.supervisor.supervisor import SNAPSHOT_INTERVAL_S, Supervisor
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.auth.api_key_table import ApiKeyTable
from onward.web.server.tls_files import check_tls, tls_files

BACKLOG = 2048
MAX_BLOCK_SIZE = 1024
MAX_THREADS = 1024
MAX_API_PROCESSES = 64
"""Each takes some 100 MB and a share of a core."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="model to serve; the same as --model")
    parser.usage = "onward serve [MODEL] [flags]"
    add_grouped_flags(parser, ServeConfig, flag_groups.SERVE)


def run(args: argparse.Namespace) -> int:
    check_model_given(args)
    config: ServeConfig = from_args(args, ServeConfig)
    if args.model_argument:
        config = replace(config, model=args.model_argument)
    key_source, keys, cluster_key = check_start(config)
    # From here on the config has no plain API keys.
    config = replace(config, api_key=())
    log.configure("supervisor", config.log_level, config.log_format)
    for warning in exposure_warnings(config, keys):
        logging.getLogger(__name__).warning(warning)
    signal.signal(signal.SIGTERM, _leave_quietly)
    predecessor = find_old_server(config) if config.adopt else None
    with _server_sockets(config, predecessor) as (listening, handoff):
        pd = resolve_pd(config, cluster_key, handoff.getsockname()[1] if handoff is not None else None)
        routers = resolve_registration(config, listening.getsockname()[1])
        serve(config, listening, handoff, pd, routers, key_source, predecessor)
    logging.getLogger(__name__).info("stopped")
    return 0


def check_start(config: ServeConfig) -> tuple[ApiKeySource, ApiKeyTable, str]:
    """Checks flags and keys, all that needs neither the model nor a socket. Returns the API keys and the cluster key."""
    check(config)
    key_source = key_source_from_config(config)
    keys = key_source.read()
    check_exposure(config, keys)
    check_demo(config, keys)
    return key_source, keys, read_key(config.cluster_key_file)


def serve(
    config: ServeConfig,
    listening: socket.socket,
    handoff: socket.socket | None,
    pd: PdConfig,
    routers: RegistrationConfig,
    key_source: ApiKeySource,
    predecessor: Predecessor | None = None,
) -> None:
    for warning in pd_warnings(config):
        logging.getLogger(__name__).warning(warning)
    num_keys = len(key_source.read())
    with ProgressDisplay(Console(stderr=True)) as progress:
        model = prepare_model(config, progress)
        check_ranks(config, model)
        if (disabled := chat_disabled(model)) is not None:
            logging.getLogger(__name__).warning(f"chat is {disabled}")

        def on_ready(worker: WorkerHello) -> None:
            progress.stop()
            cores = len(os.sched_getaffinity(0))
            for warning in filter(None, (pool_warning(worker), threads_warning(config, worker, cores))):
                logging.getLogger(__name__).warning(warning)
            url, console = _url_of(config, listening), Console(highlight=False)
            lines = summary(config, model, worker, url, pd, routers, num_keys=num_keys)
            print_ready(console, config, model, url, pd, routers, lines, needs_key=key_source.has_keys)

        supervisor = Supervisor(
            config,
            model,
            listening,
            SystemClock(),
            pd=pd,
            routers=routers,
            handoff=handoff,
            key_source=key_source,
            on_progress=progress,
            on_ready=on_ready,
            predecessor=predecessor,
        )
        with hold_model(Path(model.folder)):
            supervisor.run()


def prepare_model(config: ServeConfig, progress: ProgressDisplay) -> PreparedModel:
    return model_store.prepare(
        config.model,
        served_model_names=config.served_model_name,
        aliases=config.model_alias,
        dtype=config.dtype,
        quantization=config.quantization,
        load_format=config.load_format,
        generation_config=config.generation_config,
        revision=config.revision,
        chat_template=config.chat_template,
        max_model_len=config.max_model_len,
        tensor_parallel=config.tensor_parallel,
        device=config.device,
        deterministic=config.deterministic,
        cache_dir=cache_dir(),
        progress=progress,
    )


def check_model_given(args: argparse.Namespace) -> None:
    """Refuses `--served-model-name NAME MODEL`: it takes MODEL for a second name, and would silently serve the default
    model."""
    names = args.served_model_name or ()
    if len(names) > 1 and not (args.model or args.model_argument):
        raise StartupError(
            f"--served-model-name has {len(names)} names and no MODEL is given: put MODEL before the flag, "
            "or name the default model with --model"
        )


def check(config: ServeConfig) -> None:
    """Checks all that can be checked before anything is loaded."""
    check_counts(config, "block_size", "max_num_seqs", "max_num_batched_tokens", "max_queue", "max_queue_tokens")
    check_counts(config, "max_connections", "max_body_bytes", "num_kv_blocks", "max_model_len", "threads")
    if not 1 <= config.api_processes <= MAX_API_PROCESSES:
        raise StartupError(f"--api-processes {config.api_processes} is not within 1 to {MAX_API_PROCESSES}")
    check_not_empty(config, "model", "host", "revision", "chat_template")
    check_model_names(config)
    if config.block_size % BLOCK_MULTIPLE or config.block_size > MAX_BLOCK_SIZE:
        raise StartupError(
            f"--block-size {config.block_size} is not a multiple of {BLOCK_MULTIPLE} up to {MAX_BLOCK_SIZE}"
        )
    if (config.threads or 1) > MAX_THREADS:
        raise StartupError(f"--threads {config.threads} is not within 1 to {MAX_THREADS}")
    check_not_negative(config, "default_max_tokens", "drain_s", "log_interval_s", "detach_ttl_s", "response_ttl_s")
    check_instance_name(config.instance_name)
    check_node_name(config.node_name)
    check_log_level(config.log_level)
    check_tracing(config)
    check_origins(config.cors_origin)
    check_allowed_hosts(config.allowed_host)
    check_batches(config)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise StartupError(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}): every running request needs a token per step"
        )
    _check_stall_timeout(config.stall_timeout_s)
    if not 0 < config.stopped_timeout_s < math.inf:
        raise StartupError(f"--stopped-timeout-s {config.stopped_timeout_s:g} must be above 0")
    check_tensor_parallel(config)
    check_device(config)
    check_speculation(config.speculative)
    check_port(config.port)
    check_port(config.kv_port, "--kv-port")
    _check_files(config)
    if (tls := tls_files(config)) is not None:
        check_tls(tls)
    check_routers(config)
    check_pd(config)


def _check_stall_timeout(timeout_s: float) -> None:
    if not SNAPSHOT_INTERVAL_S < timeout_s < math.inf:
        raise StartupError(
            f"--stall-timeout-s {timeout_s:g} must be above {SNAPSHOT_INTERVAL_S:g}: processes are asked once "
            "a second, and killed if they have not answered for this time"
        )


def check_tensor_parallel(config: ServeConfig) -> None:
    """Checks what does not depend on the model. `model_store` checks the rest with `check_num_ranks`."""
    if not 1 <= config.tensor_parallel <= MAX_RANKS:
        raise StartupError(f"--tensor-parallel {config.tensor_parallel} is not within 1 to {MAX_RANKS}")


def exchanges_kv(config: ServeConfig) -> bool:
    return config.role != "mixed" or bool(prefill_peers_of(config)) or config.handoff_port is not None


def check_ranks(config: ServeConfig, model: PreparedModel) -> None:
    """Checks what depends on the precision of the model, which the flags need not say."""
    if config.tensor_parallel > 1 and model.quantization == "none" and exchanges_kv(config):
        raise StartupError(
            f"--tensor-parallel {config.tensor_parallel}: ranks of a float model have the KV of their own heads, which "
            "they cannot exchange with other instances; start with --role mixed or --quantization int8, or with one rank"
        )


def check_speculation(text: str | None) -> None:
    if text is not None and parse_speculative(text).kind == "eagle":
        require_torch(f"--speculative {text}", alternative="--speculative ngram:4")


def check_device(config: ServeConfig) -> None:
    model_store.check_packages(device=config.device, quantization=config.quantization)
    if not 0 < config.gpu_memory_utilization <= 1:
        raise StartupError(f"--gpu-memory-utilization {config.gpu_memory_utilization} is not within 0 to 1")
    if config.device == "cuda" and exchanges_kv(config):
        raise StartupError(
            "an instance with --device cuda computes its prompts itself: it cannot exchange KV with others"
        )
    if config.device == "cuda" and config.speculative is not None:
        raise StartupError(
            f"--speculative {config.speculative} is for --device cpu; --device cuda does not verify drafts"
        )
    if config.device == "cuda":
        cuda_probe.require_cuda_device()


def _check_files(config: ServeConfig) -> None:
    if config.step_log is not None:
        check_step_log(config.step_log)
    if config.record_tokens and config.record is None:
        raise StartupError("--record-tokens is about --record FILE, which is missing")
    if config.record is not None:
        check_recording(config.record)


def find_old_server(config: ServeConfig) -> Predecessor | None:
    """Returns the server to take over from, or None if nothing listens on the port."""
    if config.port == 0:
        raise StartupError("--adopt needs the --port of the server to replace")
    predecessor = find_predecessor(config.host, config.port)
    if predecessor is None:
        logging.getLogger(__name__).info(log.event("no old server to adopt", host=config.host, port=config.port))
    return predecessor


@contextmanager
def _server_sockets(
    config: ServeConfig, predecessor: Predecessor | None
) -> Iterator[tuple[socket.socket, socket.socket | None]]:
    """Yields the sockets for clients and, if there is one, for decode instances. The sockets of an old server stay open
    throughout, so that no connection is refused while the new server takes over."""
    if predecessor is None:
        with listen(config.host, config.port, "--port") as listening, _handoff_socket(config) as handoff:
            yield listening, handoff
        return
    port, old = handoff_port_to_open(config), predecessor.handoff
    is_old_kept = old is not None and port in (0, old.getsockname()[1])
    if old is not None and not is_old_kept:
        old.close()
    with predecessor.listening, nullcontext(old) if is_old_kept else _handoff_socket(config) as handoff:
        yield predecessor.listening, handoff


def _handoff_socket(config: ServeConfig) -> AbstractContextManager[socket.socket | None]:
    port = handoff_port_to_open(config)
    return nullcontext() if port is None else listen(config.host, port, "--handoff-port")


def listen(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as fault:
        sock.close()
        raise StartupError(f"cannot listen on {host}:{port}: {fault.strerror}; {_advice(fault, flag)}") from fault
    except (TypeError, UnicodeError):
        sock.close()
        raise StartupError(f"--host {host[:80]!r} is not a host name") from None
    return sock


def _advice(fault: OSError, flag: str) -> str:
    if isinstance(fault, socket.gaierror) or fault.errno == errno.EADDRNOTAVAIL:
        return "say an address of this machine with --host"
    return f"choose another {flag}, or stop what uses this one"


def _url_of(config: ServeConfig, listening: socket.socket) -> str:
    return http_url(*listening.getsockname()[:2], tls=config.tls_cert is not None)


def _leave_quietly(_number: int, _frame: object) -> None:
    sys.exit(0)

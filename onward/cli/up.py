"""`onward up`: a whole cluster on this machine in one command, for trying and testing.

Makes command lines for `onward serve` and hands them to `supervisor.cluster`; the instances know nothing of it.
"""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward import log
from onward.cli.flags import add_flags, from_args
from onward.cli.progress import StartProgress
from onward.cli.serve import check, prepare_model
from onward.cli.welcome import GREETING, curl
from onward.clock import SystemClock
from onward.config import ServeConfig
from onward.errors import StartupError
from onward.supervisor.cluster import Cluster, InstancePlan
from onward.supervisor.cluster_key import new_key
from onward.transport.addresses import tcp_address

LOOPBACK = "127.0.0.1"
MAX_INSTANCES = 64
OURS_TO_SAY = (
    "role",
    "port",
    "handoff_port",
    "prefill_peers",
    "cluster_key_file",
    "record",
    "record_tokens",
    "step_log",
)
"""Knobs that differ from instance to instance, and those that name a file that only one instance could write."""


@dataclass(slots=True, frozen=True)
class Counts:
    prefill: int
    decode: int
    mixed: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--prefill", type=int, metavar="P", help="prefill instances [1, or 0 if only --mixed is given]")
    parser.add_argument("--decode", type=int, metavar="D", help="decode instances [1, or 0 if only --mixed is given]")
    parser.add_argument("--mixed", type=int, metavar="M", help="instances that do both, each by itself [0]")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port of the first that takes requests [8000]"
    )
    add_flags(parser, ServeConfig, skip=OURS_TO_SAY)


def run(args: argparse.Namespace) -> int:
    config: ServeConfig = from_args(args, ServeConfig)
    if args.model_argument:
        args.model = args.model_argument
        config = replace(config, model=args.model_argument)
    counts = counts_of(args.prefill, args.decode, args.mixed)
    check(replace(config, port=args.port))
    log.set_up("cluster", config.log_level)
    with StartProgress(Console(stderr=True)) as progress:
        model_name = prepare_model(config, progress).name
    with _reserved_ports(counts, config.host, args.port) as ports, _key_in_memory() as key_fd:
        cores = len(os.sched_getaffinity(0))
        threads = config.threads or threads_each(cores, counts.total)
        plans = plan(counts, passed_on(args), config.host, threads, ports, f"/dev/fd/{key_fd}")
        print(f"{counts.total} instances with --threads {threads} each, on {cores} cores", file=sys.stderr)
        cluster = Cluster(
            plans,
            SystemClock(),
            inherit_fds=(key_fd,),
            greeting=GREETING,
            drain_s=config.drain_s,
            on_line=lambda name, line: print(f"{name:<9} | {line}", file=sys.stderr, flush=True),
            on_ready=lambda cluster: show(Console(highlight=False), cluster, model_name),
        )
        cluster.run()
    return 0


def counts_of(prefill: int | None, decode: int | None, mixed: int | None) -> Counts:
    """One of each kind unless told otherwise; whoever asks for mixed ones alone gets those alone."""
    unsaid = 0 if mixed and prefill is None and decode is None else 1
    counts = Counts(
        prefill=unsaid if prefill is None else prefill,
        decode=unsaid if decode is None else decode,
        mixed=mixed or 0,
    )
    for name in ("prefill", "decode", "mixed"):
        if getattr(counts, name) < 0:
            raise StartupError(f"--{name} must not be negative")
    if not counts.decode + counts.mixed:
        raise StartupError("nobody would take requests: ask for at least one instance with --decode or --mixed")
    if counts.prefill and not counts.decode:
        raise StartupError("--prefill instances work for decode instances: ask for at least one with --decode")
    if counts.total > MAX_INSTANCES:
        raise StartupError(f"{counts.total} instances are more than the {MAX_INSTANCES} that one command starts")
    return counts


def threads_each(cores: int, workers: int) -> int:
    return max(1, cores // workers)


@dataclass(slots=True, frozen=True)
class Ports:
    """In the order of the instances: prefill, decode, mixed."""

    http: tuple[int, ...]
    handoff: tuple[int, ...]


def plan(counts: Counts, flags: list[str], host: str, threads: int, ports: Ports, key_file: str) -> list[InstancePlan]:
    """Prefill instances first: they are there when the others look for them."""
    peers = [tcp_address(LOOPBACK, port) for port in ports.handoff]
    names = [f"prefill-{i}" for i in range(counts.prefill)] + [f"decode-{i}" for i in range(counts.decode)]
    names += [f"mixed-{i}" for i in range(counts.mixed)]
    plans = []
    for index, (name, http_port) in enumerate(zip(names, ports.http, strict=True)):
        role = name.split("-")[0]
        own_host = LOOPBACK if role == "prefill" else host
        own = ["--role", role, "--host", own_host, "--port", str(http_port), "--threads", str(threads)]
        own += ["--cluster-key-file", key_file]
        if role == "prefill":
            own += ["--handoff-port", str(ports.handoff[index])]
        if role == "decode" and peers:
            own += ["--prefill-peers", ",".join(peers)]
        url = tcp_address(own_host, http_port).replace("tcp://", "http://")
        handoff_address = peers[index] if role == "prefill" else None
        command = (sys.executable, "-m", "onward.cli.main", "serve", *flags, *own)
        plans.append(InstancePlan(name, role, command, url, handoff_address, threads))
    return plans


def passed_on(args: argparse.Namespace) -> list[str]:
    """The flags of `onward serve` that were given to us, for every instance."""
    flags: list[str] = []
    for knob in fields(ServeConfig):
        value = getattr(args, knob.name, None)
        if value is None or knob.name in (*OURS_TO_SAY, "host", "threads"):
            continue
        flag = knob.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for one in value if isinstance(value, list) else [value]:
                flags += [f"--{flag}", str(one)]
    return flags


@contextlib.contextmanager
def _reserved_ports(counts: Counts, host: str, port: int) -> Iterator[Ports]:
    """Ports that stay the cluster's for its life, also while an instance is restarted: a socket that is bound but does not
    listen keeps others away, and lets our children in, which say SO_REUSEADDR as well."""
    with contextlib.ExitStack() as held:
        http = [held.enter_context(_bound(LOOPBACK, 0)) for _ in range(counts.prefill)]
        http.append(held.enter_context(_bound(host, port)))
        http += [held.enter_context(_bound(host, 0)) for _ in range(counts.decode + counts.mixed - 1)]
        handoff = [held.enter_context(_bound(LOOPBACK, 0)) for _ in range(counts.prefill)]
        numbers = [tuple(sock.getsockname()[1] for sock in sockets) for sockets in (http, handoff)]
        yield Ports(*numbers)


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as fault:
        sock.close()
        raise StartupError(f"cannot use {host}:{port}: {fault.strerror}; choose another --port") from fault
    return sock


@contextlib.contextmanager
def _key_in_memory() -> Iterator[int]:
    """A new key in a file that has no name and is gone with the processes that hold it."""
    fd = os.memfd_create("onward-cluster-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, new_key().encode())
        yield fd
    finally:
        os.close(fd)


def show(console: Console, cluster: Cluster, model_name: str) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("instance", "url", "hand-over address", "threads", "pid"):
        table.add_column(title, no_wrap=True, style="bold cyan" if title == "url" else None)
    for instance in cluster.instances:
        assert instance.process is not None, "all are ready"
        told = instance.plan
        handoff_address = told.handoff_address or ""
        table.add_row(told.name, told.url, handoff_address, str(told.threads), str(instance.process.pid))
    console.print(Text.assemble("\n  Onward serves ", (model_name, "bold"), " with a cluster\n"))
    console.print(table)
    first = next(instance.plan.url for instance in cluster.instances if instance.plan.role != "prefill")
    console.print("\n" + curl(model_name, first), soft_wrap=True, markup=False)

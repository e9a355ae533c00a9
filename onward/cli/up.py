"""`onward up`: a whole cluster on this machine in one command, for trying and testing.

Makes command lines for `onward serve` and `onward router` and hands them to `supervisor.local_cluster`; those know nothing
of it. With a router in front only the router is reached from outside, and it is the router that names prefill peers.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward import log
from onward.cli import flag_groups
from onward.cli.api_keys import check_demo, check_exposure, key_source_from_config
from onward.cli.flags import add_flags, add_grouped_flags, format_flags, from_args
from onward.cli.progress import ProgressDisplay
from onward.cli.ready_message import READY_LINE_PREFIX, curl_example
from onward.cli.router import check as check_router
from onward.cli.serve import check, prepare_model
from onward.clock import SystemClock
from onward.config import API_KEY_VARIABLE, RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.obs.tables import print_table
from onward.proto.model import PreparedModel
from onward.supervisor.cluster_key import new_key
from onward.supervisor.local_cluster import LocalCluster, MemberSpec
from onward.supervisor.registration_config import LOOPBACK, http_url, loopback_for
from onward.transport.addresses import tcp_address

MAX_INSTANCES = 64
FLAGS_SET_PER_INSTANCE = (
    "role",
    "port",
    "handoff_port",
    "prefill_peers",
    "cluster_key_file",
    "router",
    "instance_name",
    "advertise_url",
    "record",
    "record_tokens",
    "step_log",
    "api_key",
    "api_key_file",
    "api_keys",
    "insecure",
    "open_metrics",
    "tls_cert",
    "tls_key",
)
"""Flags that differ from instance to instance, flags that name a file that only one instance could write, and flags of
the process that clients connect to."""
ROUTER_ONLY_FLAGS = (
    "policy",
    "prefill_policy",
    "decode_policy",
    "preempt_retry_count",
    "preempt_retry_exclude_decode",
    "retry_budget",
    "restart_grace_s",
    "request_timeout_s",
    "report_resumes",
)
FRONTEND_SECRETS = ("api_key", "api_key_file")
"""Whoever stands in front has them from its environment: command lines can be read by everybody on the machine."""
FRONTEND_FLAGS = ("api_keys", "insecure", "open_metrics")
"""For the router, or without one for the instances that take requests."""
SHARED_FLAGS = (
    "detach_ttl_s",
    "drain_s",
    "cors_origin",
    "allowed_host",
    "demo",
    "strict_fields",
    "max_body_bytes",
    "max_connections",
    "default_max_tokens",
    "log_level",
    "log_format",
    "otlp_endpoint",
    "trace_sample_ratio",
    "trace_url",
)


@dataclass(slots=True, frozen=True)
class InstanceCounts:
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
        "--router",
        action=argparse.BooleanOptionalAction,
        default=True,
        dest="with_router",
        help="put a router in front; it takes the requests and carries streams on [on]",
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port of the router, or else of the first instance [8000]"
    )
    parser.usage = "onward up [MODEL] [flags]"
    add_grouped_flags(parser, ServeConfig, flag_groups.SERVE, skip=FLAGS_SET_PER_INSTANCE)
    for title, names in (
        ("who may use it", (*FRONTEND_SECRETS, *FRONTEND_FLAGS)),
        ("options of the router", ROUTER_ONLY_FLAGS),
    ):
        skipped = tuple(f.name for f in fields(RouterConfig) if f.name not in names)
        add_flags(parser.add_argument_group(title), RouterConfig, skip=skipped)


def run(args: argparse.Namespace) -> int:
    config: ServeConfig = from_args(args, ServeConfig)
    if args.model_argument:
        args.model = args.model_argument
        config = replace(config, model=args.model_argument)
    counts = counts_of(args.prefill, args.decode, args.mixed, config.device)
    check(replace(config, port=args.port))
    check_kv_ports(config.kv_port, counts)
    check_router_flags(args)
    frontend_keys = frontend_keys_from_args(args, config.host)
    log.configure("cluster", config.log_level, config.log_format)
    with ProgressDisplay(Console(stderr=True)) as progress:
        model = prepare_model(config, progress)
    with (
        _reserved_ports(counts, config.host, args.port, with_router=args.with_router, first_kv=config.kv_port) as ports,
        _key_in_memory() as key_fd,
    ):
        cores = len(os.sched_getaffinity(0))
        threads = config.threads or threads_each(cores, counts.total)
        key_file = f"/dev/fd/{key_fd}"
        plans = plan(counts, instance_flags(args), config.host, threads, ports, key_file, frontend_keys)
        if ports.router is not None:
            plans.insert(0, plan_router(router_flags(args), config.host, ports.router, key_file, frontend_keys))
        print(f"{counts.total} instances with --threads {threads} each, on {cores} cores", file=sys.stderr)
        cluster = LocalCluster(
            plans,
            SystemClock(),
            inherit_fds=(key_fd,),
            ready_prefix=READY_LINE_PREFIX,
            drain_s=config.drain_s,
            on_line=lambda name, line: print(member_line(name, line), file=sys.stderr, flush=True),
            on_ready=lambda cluster: print_cluster(
                Console(highlight=False),
                cluster,
                model,
                key_fd,
                needs_key=frontend_keys.has_keys,
            ),
        )
        cluster.run()
    return 0


def member_line(name: str, line: str) -> str:
    """A line of one process group as the cluster prints it: a line of JSON stays one, with a key more."""
    if line.startswith('{"'):
        return f'{{"instance": {json.dumps(name)}, {line[1:]}'
    return f"{name:<9} | {line}"


@dataclass(slots=True, frozen=True)
class FrontendKeys:
    """The API keys of the processes that clients connect to."""

    flags: tuple[str, ...] = ()
    api_key: str = ""
    has_keys: bool = False

    @property
    def has_key_file(self) -> bool:
        """Which can be read again."""
        return "--api-keys" in self.flags

    @property
    def environment(self) -> dict[str, str]:
        return {API_KEY_VARIABLE: self.api_key}


def frontend_keys_from_args(args: argparse.Namespace, host: str) -> FrontendKeys:
    given = {
        name: getattr(args, name) for name in (*FRONTEND_SECRETS, *FRONTEND_FLAGS) if getattr(args, name) is not None
    }
    config = RouterConfig(host=host, cluster_key_file="ours", **given)
    source = key_source_from_config(config)
    keys = source.read()
    check_exposure(config, keys)
    check_demo(replace(config, demo=bool(args.demo)), keys)
    if len(source.plain) > 1:
        raise StartupError("a cluster takes one --api-key; put several into a file for --api-keys")
    return FrontendKeys(tuple(format_flags(args, FRONTEND_FLAGS)), next(iter(source.plain), ""), has_keys=len(keys) > 0)


def check_router_flags(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ROUTER_ONLY_FLAGS if getattr(args, name) is not None}
    if given and not args.with_router:
        raise StartupError(f"--{next(iter(given)).replace('_', '-')} is for a router, and --no-router leaves it out")
    check_router(RouterConfig(**given))


def counts_of(prefill: int | None, decode: int | None, mixed: int | None, device: str = "cpu") -> InstanceCounts:
    """One of each kind unless told otherwise; whoever asks for mixed ones alone gets those alone. Instances on CUDA do not
    exchange KV, so there each does both."""
    if device == "cuda":
        if prefill or decode:
            raise StartupError("instances with --device cuda cannot exchange KV: ask for --mixed ones")
        prefill, decode, mixed = 0, 0, 1 if mixed is None else mixed
    default_count = 0 if mixed and prefill is None and decode is None else 1
    counts = InstanceCounts(
        prefill=default_count if prefill is None else prefill,
        decode=default_count if decode is None else decode,
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


def check_kv_ports(first: int, counts: InstanceCounts) -> None:
    last = first + max(0, counts.decode - 1)
    if first < 0 or (first and last > 65535):
        raise StartupError(f"--kv-port {first}: {counts.decode} decode instances need the ports up to {last}")


def threads_each(cores: int, workers: int) -> int:
    return max(1, cores // workers)


@dataclass(slots=True, frozen=True)
class ReservedPorts:
    """In the order of the instances: prefill, decode, mixed."""

    http: tuple[int, ...]
    handoff: tuple[int, ...]
    router: int | None = None
    first_kv_port: int = 0
    """Of the decode instances, each of which has the next one; 0: any that are free."""


def plan(
    counts: InstanceCounts,
    flags: list[str],
    host: str,
    threads: int,
    ports: ReservedPorts,
    key_file: str,
    frontend_keys: FrontendKeys | None = None,
) -> list[MemberSpec]:
    """Prefill instances first: they are there when the others look for them."""
    peers = [tcp_address(LOOPBACK, port) for port in ports.handoff]
    names = [f"prefill-{i}" for i in range(counts.prefill)] + [f"decode-{i}" for i in range(counts.decode)]
    names += [f"mixed-{i}" for i in range(counts.mixed)]
    plans = []
    for index, (name, http_port) in enumerate(zip(names, ports.http, strict=True)):
        role = name.split("-")[0]
        own_host = LOOPBACK if role == "prefill" or ports.router is not None else host
        own_flags = [
            "--instance-name",
            name,
            "--role",
            role,
            "--host",
            own_host,
            "--port",
            str(http_port),
            "--threads",
            str(threads),
        ]
        own_flags += ["--cluster-key-file", key_file]
        if role == "prefill":
            own_flags += ["--handoff-port", str(ports.handoff[index])]
        if role == "decode" and ports.first_kv_port:
            own_flags += ["--kv-port", str(ports.first_kv_port + index - counts.prefill)]
        if ports.router is not None:
            own_flags += _behind_router(host, ports.router, http_url(own_host, http_port), flags)
        elif role == "decode" and peers:
            own_flags += ["--prefill-peers", ",".join(peers)]
        handoff_address = peers[index] if role == "prefill" else None
        # Those behind the front are reached with the cluster's key alone, whatever our environment says.
        instance_keys = (
            frontend_keys
            if frontend_keys is not None and role != "prefill" and ports.router is None
            else FrontendKeys()
        )
        own_flags += instance_keys.flags
        command = (sys.executable, "-m", "onward.cli.main", "serve", *flags, *own_flags)
        plans.append(
            MemberSpec(
                name,
                role,
                command,
                http_url(own_host, http_port),
                handoff_address,
                threads,
                instance_keys.environment,
                reloads_on_sighup=instance_keys.has_key_file,
            )
        )
    return plans


def _behind_router(host: str, router_port: int, own_url: str, flags: list[str]) -> list[str]:
    """The router may listen on an address that looks like another machine's; everyone is on this one all the same."""
    flags_behind_router = ["--router", http_url(loopback_for(host), router_port), "--advertise-url", own_url]
    return flags_behind_router if "--kv-backend" in flags else [*flags_behind_router, "--kv-backend", "shm"]


def plan_router(
    flags: list[str], host: str, port: int, key_file: str, frontend_keys: FrontendKeys | None = None
) -> MemberSpec:
    frontend_keys = frontend_keys or FrontendKeys()
    own_flags = ["--host", host, "--port", str(port), "--cluster-key-file", key_file]
    command = (sys.executable, "-m", "onward.cli.main", "router", *flags, *own_flags, *frontend_keys.flags)
    url = http_url(host, port)
    return MemberSpec(
        "router",
        "router",
        command,
        url,
        None,
        None,
        frontend_keys.environment,
        reloads_on_sighup=frontend_keys.has_key_file,
    )


def instance_flags(args: argparse.Namespace) -> list[str]:
    """The flags of `onward serve` that were given to us, for every instance."""
    skipped = (*FLAGS_SET_PER_INSTANCE, "host", "threads", "kv_port")
    return format_flags(args, tuple(field.name for field in fields(ServeConfig) if field.name not in skipped))


def router_flags(args: argparse.Namespace) -> list[str]:
    return format_flags(args, (*ROUTER_ONLY_FLAGS, *SHARED_FLAGS))


@contextlib.contextmanager
def _reserved_ports(
    counts: InstanceCounts, host: str, port: int, *, with_router: bool, first_kv: int = 0
) -> Iterator[ReservedPorts]:
    """Ports that stay the cluster's for its life, also while one of it is restarted: a socket that is bound but does not
    listen keeps others away, and lets our children in, which say SO_REUSEADDR as well."""
    with contextlib.ExitStack() as stack:

        def hold(host: str, port: int = 0) -> int:
            return stack.enter_context(_bound(host, port)).getsockname()[1]

        frontend_port = hold(host, port)
        http = [hold(LOOPBACK) for _ in range(counts.prefill)]
        handoff = tuple(hold(LOOPBACK) for _ in range(counts.prefill))
        if with_router:
            http += [hold(LOOPBACK) for _ in range(counts.decode + counts.mixed)]
            yield ReservedPorts(tuple(http), handoff, frontend_port, first_kv)
        else:
            http += [frontend_port, *(hold(host) for _ in range(counts.decode + counts.mixed - 1))]
            yield ReservedPorts(tuple(http), handoff, None, first_kv)


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


def print_cluster(
    console: Console, cluster: LocalCluster, model: PreparedModel, key_fd: int, *, needs_key: bool
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("process", "url", "handoff address", "threads", "pid"):
        table.add_column(title, no_wrap=True, style="bold cyan" if title == "url" else None)
    for instance in cluster.members:
        assert instance.process is not None, "all are ready"
        spec = instance.spec
        threads = str(spec.threads) if spec.threads is not None else ""
        table.add_row(spec.name, spec.url, spec.handoff_address or "", threads, str(instance.process.pid))
    console.print(Text.assemble("\n  Onward serves ", (model.name, "bold"), " with a cluster\n"))
    print_table(console, table)
    frontend_url = next(instance.spec.url for instance in cluster.members if instance.spec.role != "prefill")
    # The key has no name, but whoever may trace this process can read it, and that is its owner.
    key = f"--cluster-key-file /proc/{os.getpid()}/fd/{key_fd}"
    console.print(f"\n  onward status {frontend_url} {key}", soft_wrap=True, markup=False)
    console.print("\n" + curl_example(model, frontend_url, needs_key=needs_key), soft_wrap=True, markup=False)

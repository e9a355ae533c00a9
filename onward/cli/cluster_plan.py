"""The command lines of a cluster on this machine, and the ports that are reserved for it.

With a router in front, only the router is reachable from outside, and the router names prefill peers. It starts no process.
"""

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onward.config import API_KEY_VARIABLE
from onward.errors import StartupError
from onward.supervisor.cluster_member import ClusterMember, MemberSpec
from onward.supervisor.registration_config import LOOPBACK, http_url, loopback_for
from onward.supervisor.scale_change import ROLES, member_number
from onward.transport.addresses import tcp_address

MAX_INSTANCES = 64


@dataclass(slots=True, frozen=True)
class InstanceCounts:
    prefill: int
    decode: int
    mixed: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    def times(self, num_models: int) -> "InstanceCounts":
        """Returns the counts for several models, each with so many instances."""
        counts = InstanceCounts(self.prefill * num_models, self.decode * num_models, self.mixed * num_models)
        counts.check_total()
        return counts

    def check_total(self) -> None:
        if self.total > MAX_INSTANCES:
            raise StartupError(f"{self.total} instances are more than the {MAX_INSTANCES} that one command starts")

    def names(self) -> list[str]:
        """Returns the names of the instances, prefill instances first, so that they are there when the others look for
        them."""
        return [f"{role}-{number}" for role in ROLES for number in range(getattr(self, role))]


def check_instance_counts(counts: InstanceCounts, device: str) -> None:
    """Raises `StartupError` for numbers of instances that cannot work together."""
    if device == "cuda" and counts.prefill + counts.decode:
        raise StartupError("instances with --device cuda cannot exchange KV: ask for --mixed ones")
    for name in ("prefill", "decode", "mixed"):
        if getattr(counts, name) < 0:
            raise StartupError(f"--{name} must not be negative")
    if not counts.decode + counts.mixed:
        raise StartupError("no instance would take requests: ask for at least one with --decode or --mixed")
    if counts.prefill and not counts.decode:
        raise StartupError("--prefill instances work for decode instances: ask for at least one with --decode")
    counts.check_total()


@dataclass(slots=True, frozen=True)
class FrontendKeys:
    """The API keys of the processes that clients connect to, as command-line flags and an environment variable. The
    default is no keys."""

    flags: tuple[str, ...] = ()
    api_key: str = ""
    has_keys: bool = False

    @property
    def has_key_file(self) -> bool:
        """Whether there is a file with keys, which can be read again."""
        return "--api-keys" in self.flags

    @property
    def environment(self) -> dict[str, str]:
        return {API_KEY_VARIABLE: self.api_key}


@dataclass(slots=True, frozen=True)
class ReservedPorts:
    """Ports in the order of the instances: prefill, decode, mixed."""

    http: tuple[int, ...]
    handoff: tuple[int, ...]
    router: int | None = None
    first_kv_port: int = 0
    """KV port of the first decode instance; each further one has the next port. 0: any free ports."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model of a cluster, as its instances are told of it."""

    name: str = ""
    flags: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class InstancePlan:
    """What all instances of a cluster have in common."""

    flags: Sequence[str]
    host: str
    threads: int
    key_file: str
    router_port: int | None = None
    first_kv_port: int = 0
    frontend_keys: FrontendKeys = field(default_factory=FrontendKeys)
    peers: Sequence[str] = ()
    """Handoff addresses of prefill instances, for a cluster without a router."""

    def member(self, name: str, http_port: int, handoff_port: int | None, model: ServedModel) -> MemberSpec:
        """Returns the member of this name. `handoff_port` is for prefill instances."""
        role = name.split("-")[0]
        host = LOOPBACK if role == "prefill" or self.router_port is not None else self.host
        url = http_url(host, http_port)
        # Instances that clients do not connect to accept only the cluster key, whatever API key our environment has.
        takes_clients = role != "prefill" and self.router_port is None
        keys = self.frontend_keys if takes_clients else FrontendKeys()
        flags = ["--instance-name", name, "--role", role, "--host", host, "--port", str(http_port)]
        flags += ["--threads", str(self.threads), "--cluster-key-file", self.key_file]
        flags += self._handoff_flags(role, handoff_port) + self._kv_port_flags(role, name)
        if self.router_port is not None:
            flags += self._flags_behind_router(self.router_port, url)
        flags += [*keys.flags, *model.flags]
        return MemberSpec(
            name,
            role,
            (sys.executable, "-m", "onward.cli.main", "serve", *self.flags, *flags),
            url,
            None if handoff_port is None else tcp_address(LOOPBACK, handoff_port),
            self.threads,
            keys.environment,
            reloads_on_sighup=keys.has_key_file,
            model=model.name,
        )

    def _handoff_flags(self, role: str, handoff_port: int | None) -> list[str]:
        if handoff_port is not None:
            return ["--handoff-port", str(handoff_port)]
        return ["--prefill-peers", ",".join(self.peers)] if role == "decode" and self.peers else []

    def _kv_port_flags(self, role: str, name: str) -> list[str]:
        if role != "decode" or not self.first_kv_port:
            return []
        port = self.first_kv_port + member_number(name)
        if port > 65535:
            raise StartupError(f"--kv-port {self.first_kv_port}: {name} would need port {port}")
        return ["--kv-port", str(port)]

    def _flags_behind_router(self, router_port: int, own_url: str) -> list[str]:
        """Returns the flags of an instance behind the router. The router may listen on an address that looks like another
        machine's, but all processes are on this machine. So the addresses are loopback ones, and KV goes through `shm`
        unless a flag names another backend."""
        flags = ["--router", http_url(loopback_for(self.host), router_port), "--advertise-url", own_url]
        return flags if "--kv-backend" in self.flags else [*flags, "--kv-backend", "shm"]


def plan(
    counts: InstanceCounts,
    flags: Sequence[str],
    host: str,
    threads: int,
    ports: ReservedPorts,
    key_file: str,
    frontend_keys: FrontendKeys | None = None,
    models: Sequence[ServedModel] = (ServedModel(),),
) -> list[MemberSpec]:
    """Returns the instances to start, in the order of their start. Instances of one role belong to the models in turn."""
    instances = instance_plan(flags, host, threads, ports, key_file, frontend_keys)
    handoff_ports = [*ports.handoff, *[None] * (counts.total - len(ports.handoff))]
    return [
        instances.member(name, http_port, handoff_port, models[member_number(name) % len(models)])
        for name, http_port, handoff_port in zip(counts.names(), ports.http, handoff_ports, strict=True)
    ]


def instance_plan(
    flags: Sequence[str],
    host: str,
    threads: int,
    ports: ReservedPorts,
    key_file: str,
    frontend_keys: FrontendKeys | None = None,
) -> InstancePlan:
    peers = [] if ports.router is not None else [tcp_address(LOOPBACK, port) for port in ports.handoff]
    frontend_keys = frontend_keys or FrontendKeys()
    return InstancePlan(flags, host, threads, key_file, ports.router, ports.first_kv_port, frontend_keys, peers)


def plan_router(
    flags: list[str], host: str, port: int, key_file: str, frontend_keys: FrontendKeys | None = None
) -> MemberSpec:
    frontend_keys = frontend_keys or FrontendKeys()
    own_flags = ["--host", host, "--port", str(port), "--cluster-key-file", key_file]
    command = (sys.executable, "-m", "onward.cli.main", "router", *flags, *own_flags, *frontend_keys.flags)
    return MemberSpec(
        "router",
        "router",
        command,
        http_url(host, port),
        None,
        None,
        frontend_keys.environment,
        reloads_on_sighup=frontend_keys.has_key_file,
    )


class PortHolder:
    """Reserves ports for the cluster's lifetime, also while one of its processes restarts. A socket that is bound but does
    not listen keeps other programs away from a port, and admits our children, which set SO_REUSEADDR as well."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def hold(self, host: str, port: int = 0) -> int:
        sock = bound(host, port)
        port = sock.getsockname()[1]
        assert port not in self._sockets, "a port is reserved once"
        self._sockets[port] = sock
        return port

    def release(self, port: int) -> None:
        if sock := self._sockets.pop(port, None):
            sock.close()

    def close(self) -> None:
        for port in list(self._sockets):
            self.release(port)


def reserve_ports(
    holder: PortHolder, counts: InstanceCounts, host: str, port: int, *, with_router: bool, first_kv: int = 0
) -> ReservedPorts:
    """Reserves the ports of the processes that a cluster begins with."""
    frontend_port = holder.hold(host, port)
    http = [holder.hold(LOOPBACK) for _ in range(counts.prefill)]
    handoff = tuple(holder.hold(LOOPBACK) for _ in range(counts.prefill))
    if with_router:
        http += [holder.hold(LOOPBACK) for _ in range(counts.decode + counts.mixed)]
        return ReservedPorts(tuple(http), handoff, frontend_port, first_kv)
    http += [frontend_port, *(holder.hold(host) for _ in range(counts.decode + counts.mixed - 1))]
    return ReservedPorts(tuple(http), handoff, None, first_kv)


@contextlib.contextmanager
def port_holder() -> Iterator[PortHolder]:
    holder = PortHolder()
    try:
        yield holder
    finally:
        holder.close()


def bound(host: str, port: int) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as fault:  # no file descriptor is left, or there is no IPv6
        raise StartupError(f"cannot use {host}:{port}: {fault.strerror}") from fault
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as fault:
        sock.close()
        raise StartupError(f"cannot use {host}:{port}: {fault.strerror}; choose another --port") from fault
    return sock


@dataclass(slots=True, frozen=True)
class AddedInstances:
    """Plans instances that are added behind the router of a running cluster (`local_cluster.ScaleUpPlanner`)."""

    instances: InstancePlan
    holder: PortHolder
    models: Mapping[str, ServedModel]
    """By name."""

    def plan_member(self, role: str, model: str, members: Sequence[ClusterMember]) -> MemberSpec:
        name = free_name(role, [member.spec.name for member in members])
        ports: list[int] = []
        try:
            for _ in range(2 if role == "prefill" else 1):
                ports.append(self.holder.hold(LOOPBACK))
            return self.instances.member(name, ports[0], ports[1] if len(ports) == 2 else None, self.models[model])
        except StartupError:
            for port in ports:
                self.holder.release(port)
            raise

    def release(self, spec: MemberSpec) -> None:
        for address in filter(None, (spec.url, spec.handoff_address)):
            self.holder.release(int(address.rpartition(":")[2]))


def free_name(role: str, taken: Sequence[str]) -> str:
    """Returns the name of a role with the lowest free number."""
    return next(name for number in range(len(taken) + 1) if (name := f"{role}-{number}") not in taken)

"""Resolves the settings of prefill/decode disaggregation: prefill peers, handoff address, and how an instance gets KV.

This is done once for all processes of the instance, from the flags and the cluster key. No connection is opened here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.supervisor.registration_config import LOOPBACK, WILDCARDS, advertised_host, router_hosts, source_address_to
from onward.transport.addresses import (
    check_handoff_address,
    host_and_port,
    is_local,
    is_loopback,
    require_cluster_key,
    tcp_address,
)


@dataclass(slots=True, frozen=True)
class PdConfig:
    """Resolved settings, without `auto` and without wildcard addresses."""

    prefill_peers: tuple[str, ...] = ()
    kv_backend: Literal["shm", "tcp", "nixl"] | None = None
    kv_host: str = LOOPBACK
    kv_checksums: bool = False
    cluster_key: str = ""
    handoff_address: str | None = None
    """Address that decode instances connect to."""

    @property
    def is_enabled(self) -> bool:
        return self.kv_backend is not None or self.handoff_address is not None


def resolve_pd(config: ServeConfig, cluster_key: str, handoff_port: int | None) -> PdConfig:
    """Resolves the settings. `handoff_port` is the port that was opened for decode instances, if any."""
    peers, routers = prefill_peers_of(config), router_hosts(config)
    backend = kv_backend(config, peers, cluster_key)
    handoff_host = advertised_host(config.host, routers)
    return PdConfig(
        peers,
        backend,
        kv_host(config.host, peers, cluster_key, routers),
        kv_checksums(config, backend),
        cluster_key,
        tcp_address(handoff_host, handoff_port) if handoff_port is not None else None,
    )


def prefill_peers_of(config: ServeConfig) -> tuple[str, ...]:
    """Returns the addresses of `--prefill-peers` in the order given, without duplicates."""
    addresses = (address.strip() for address in config.prefill_peers.split(","))
    return tuple(dict.fromkeys(address for address in addresses if address))


def handoff_port_to_open(config: ServeConfig) -> int | None:
    """Returns the port to open for decode instances, 0 for any port, or None if this instance does not serve them."""
    if config.role == "prefill":
        return config.handoff_port or 0
    return config.handoff_port


def receives_kv(config: ServeConfig) -> bool:
    return config.role == "decode" or (config.role == "mixed" and bool(prefill_peers_of(config)))


def kv_backend(config: ServeConfig, peers: tuple[str, ...], cluster_key: str) -> Literal["shm", "tcp", "nixl"] | None:
    """Returns the KV backend, or None if this instance receives no KV. `auto` selects shared memory if all peers are on
    this machine, and TCP otherwise."""
    if not receives_kv(config):
        return None
    if config.kv_backend != "auto":
        return config.kv_backend
    is_all_local = all(is_local(peer) for peer in peers) and _later_peers_are_local(config, peers, cluster_key)
    return "shm" if is_all_local else "tcp"


def _later_peers_are_local(config: ServeConfig, peers: tuple[str, ...], cluster_key: str) -> bool:
    """Returns whether peers that routers or requests name later are on this machine. Peers on other machines need a
    cluster key. A router on this machine may know instances on others, and only an instance that listens on loopback
    can exclude them."""
    routers = router_hosts(config)
    if routers:
        return all(is_loopback(host) for host in routers) and (not cluster_key or is_loopback(config.host))
    return bool(peers) or not cluster_key


def kv_checksums(config: ServeConfig, backend: str | None) -> bool:
    """Returns whether the KV that arrives is compared by checksums. `auto` does so for the `tcp` backend only, and
    trusts memory."""
    return backend == "tcp" if config.kv_checksums == "auto" else config.kv_checksums == "on"


def kv_host(host: str, peers: tuple[str, ...], cluster_key: str, routers: tuple[str, ...] = ()) -> str:
    """Returns the address that peers send KV to. An instance that serves HTTP on loopback or on all addresses may have
    peers on other machines. They need its address on the route to them, or to the router that will name them. Without a
    cluster key it is loopback, because other machines are not let in."""
    if not cluster_key:
        return LOOPBACK
    if host not in WILDCARDS and not is_loopback(host):
        return host
    remote_hosts = [host_and_port(peer)[0] for peer in peers if not is_local(peer)]
    remote_hosts += [router for router in routers if not is_loopback(router)]
    if remote_hosts:
        return source_address_to(remote_hosts[0])
    return advertised_host(host)


def check_pd(config: ServeConfig) -> None:
    """Raises `StartupError` for flags that cannot work together. Called before anything is loaded."""
    peers, key_file = prefill_peers_of(config), config.cluster_key_file or ""
    if peers and config.role == "prefill":
        raise StartupError("--prefill-peers is for decode instances; one with --role prefill computes prompts itself")
    if config.role == "decode" and not peers and not config.router and not config.local_prefill:
        raise StartupError(
            "--role decode with --no-local-prefill needs --prefill-peers or a --router that names them: "
            "no instance would compute prompts"
        )
    for peer in peers:
        check_handoff_address(peer, "--prefill-peers")
        require_cluster_key(peer, key_file)
    if (port := handoff_port_to_open(config)) is not None:
        _check_handoff(config, port)
    for name in ("lease_s", "offer_hold_s", "handoff_timeout_s"):
        if not 0 < getattr(config, name) < math.inf:
            raise StartupError(f"--{name.replace('_', '-')} must be a positive number of seconds")
    if config.local_prefill_tokens < 0:
        raise StartupError("--local-prefill-tokens must not be negative")


def _check_handoff(config: ServeConfig, port: int) -> None:
    if not 0 <= port <= 65535:
        raise StartupError(f"--handoff-port {port} is not within 0 to 65535")
    if not config.cluster_key_file and not is_loopback(config.host):
        raise StartupError(
            f"--host {config.host} lets decode instances of other machines in, so the instances need a common secret: "
            "make one with `onward keygen FILE` and give it to each with --cluster-key-file FILE"
        )


def pd_warnings(config: ServeConfig) -> list[str]:
    """Returns warnings about flags that work together, but perhaps not as intended."""
    if config.role == "decode" and not prefill_peers_of(config) and not config.router:
        return ["no --prefill-peers and no --router are named: this decode instance computes all prompts itself"]
    return []

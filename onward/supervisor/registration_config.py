"""Decides which routers an instance registers with, and under which URL they reach it.

This is decided once for all processes of the instance. No connection is opened here.
"""

import ipaddress
import math
import re
import socket
from dataclasses import dataclass

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.transport.addresses import is_loopback
from onward.transport.http_urls import parse_server_url

LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "0.0.0.0", "::")
_OWN_LOOPBACK = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}
_UNBRACKETED = re.compile(r"(https?)://([0-9a-fA-F:.]+):(\d+)")
UNROUTED_ADDRESS = "192.0.2.1"
"""An address for documentation (TEST-NET-1), which belongs to no host: the route to it is this machine's default
route."""


def advertised_host(host: str, callers: tuple[str, ...] = ()) -> str:
    """Returns the address under which others can reach a server that listens on `host`. If it listens on all addresses,
    this is the machine's own address on the route to the first caller on another machine, else on the default route."""
    if host not in WILDCARDS:
        return host
    remote_callers = [caller for caller in callers if not is_loopback(caller)]
    return source_address_to(remote_callers[0] if remote_callers else UNROUTED_ADDRESS)


def loopback_for(host: str) -> str:
    """Returns the address under which this machine itself can reach a server that listens on `host`."""
    return _OWN_LOOPBACK.get(host, host)


def source_address_to(host: str) -> str:
    """Returns this machine's address on the route to `host`, an address or a name. Returns 127.0.0.1 if there is no
    route or the name cannot be resolved. Resolving may block."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return LOOPBACK


MAX_ROUTERS = 16


@dataclass(slots=True, frozen=True)
class RegistrationConfig:
    router_urls: tuple[str, ...] = ()
    own_url: str = ""
    """URL under which routers reach this instance."""


def resolve_registration(config: ServeConfig, port: int) -> RegistrationConfig:
    """Returns the routers and the own URL of an instance. `port` is the one that was opened for HTTP."""
    hosts = router_hosts(config)
    # Routers on this machine may lack a cluster key. They and this instance then accept only loopback addresses.
    is_all_local = bool(hosts) and all(map(is_loopback, hosts))
    host = loopback_for(config.host) if is_all_local else advertised_host(config.host, hosts)
    return RegistrationConfig(
        router_urls(config), advertised_url(config) or http_url(host, port, tls=config.tls_cert is not None)
    )


def advertised_url(config: ServeConfig) -> str | None:
    """Returns `--advertise-url`, with brackets around an IPv6 address: a pod template can only write http://$(POD_IP):8000,
    whatever family the address has."""
    if config.advertise_url is None:
        return None
    url = config.advertise_url.rstrip("/")
    if (match := _UNBRACKETED.fullmatch(url)) is not None and _is_ipv6(match[2]):
        return http_url(match[2], int(match[3]), tls=match[1] == "https")
    return url


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def router_urls(config: ServeConfig) -> tuple[str, ...]:
    return parse_url_list(config.router)


def router_hosts(config: ServeConfig) -> tuple[str, ...]:
    return tuple(parse_host(url, "--router") for url in router_urls(config))


def parse_url_list(text: str) -> tuple[str, ...]:
    """Returns the URLs of a comma-separated list in the order given, without duplicates, empty entries, surrounding
    spaces and trailing slashes. Does not check them."""
    urls = (url.strip().rstrip("/") for url in text.split(","))
    return tuple(dict.fromkeys(url for url in urls if url))


def parse_host(url: str, flag: str) -> str:
    """Returns the host of a server's URL. Raises `StartupError`, which names `flag`, for any other text."""
    try:
        server = parse_server_url(url)
    except ValueError as fault:
        raise StartupError(
            f"{flag}: {url!r} is not the address of a server: {fault}; it looks like http://HOST:PORT"
        ) from None
    if server.port is None:
        raise StartupError(f"{flag}: {url!r} names no port; it looks like http://HOST:PORT")
    return server.host


def check_routers(config: ServeConfig) -> None:
    """Raises `StartupError` for flags that cannot work together. Called before anything is loaded."""
    if len(router_urls(config)) > MAX_ROUTERS:
        raise StartupError(f"--router names more than {MAX_ROUTERS} routers")
    for router in router_urls(config):
        _check_router(config, router)
    if (url := advertised_url(config)) is not None:
        host = parse_host(url, "--advertise-url")
        if host in WILDCARDS:
            raise StartupError(f"--advertise-url {url} is not reachable; name an address of this machine")
    for flag, ttl_s in (("--detach-ttl-s", config.detach_ttl_s), ("--response-ttl-s", config.response_ttl_s)):
        if not 0 <= ttl_s < math.inf:
            raise StartupError(f"{flag} must be a number of seconds, and not negative")


def _check_router(config: ServeConfig, router: str) -> None:
    if is_loopback(parse_host(router, "--router")):
        return
    if not config.cluster_key_file:
        raise StartupError(
            f"--router {router} is on another machine, so router and instances need a common secret: make one with "
            "`onward keygen FILE`, copy it to every machine, and give it to each with --cluster-key-file FILE"
        )
    if is_loopback(config.host) and config.advertise_url is None:
        raise StartupError(
            f"--router {router} is on another machine and could not reach this one at --host {config.host}: "
            "listen on --host 0.0.0.0, or say with --advertise-url what reaches this instance"
        )

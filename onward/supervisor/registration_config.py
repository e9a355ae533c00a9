"""What an instance has to do with routers: which it registers with, and what they call it.

Says it once for all processes of the instance. Opens nothing and talks to nobody.
"""

import math
import socket
from dataclasses import dataclass

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.transport.addresses import is_loopback
from onward.transport.http_urls import parse_server_url

LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "0.0.0.0", "::")
_OWN_LOOPBACK = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}
UNROUTED_ADDRESS = "192.0.2.1"
"""An address that belongs to nobody: the way to it is the way out of this machine."""


def advertised_host(host: str, callers: tuple[str, ...] = ()) -> str:
    """What others may call a host that one listens on. Where that is all addresses, it is the one on the way to the first
    of those who shall call, if they are elsewhere."""
    if host not in WILDCARDS:
        return host
    remote_callers = [caller for caller in callers if not is_loopback(caller)]
    return source_address_to(remote_callers[0] if remote_callers else UNROUTED_ADDRESS)


def loopback_for(host: str) -> str:
    """What this machine itself may call a host that one listens on."""
    return _OWN_LOOPBACK.get(host, host)


def source_address_to(host: str) -> str:
    """This machine's address on the way to that one."""
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
    """As routers reach this instance."""


def resolve_registration(config: ServeConfig, port: int) -> RegistrationConfig:
    """`port` is the one that was opened for HTTP."""
    hosts = router_hosts(config)
    # Routers of this machine may lack a cluster key, and then they and we take each other's loopback addresses only.
    is_all_local = bool(hosts) and all(map(is_loopback, hosts))
    host = loopback_for(config.host) if is_all_local else advertised_host(config.host, hosts)
    advertised_url = config.advertise_url.rstrip("/") if config.advertise_url else None
    return RegistrationConfig(
        router_urls(config), advertised_url or http_url(host, port, tls=config.tls_cert is not None)
    )


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def router_urls(config: ServeConfig) -> tuple[str, ...]:
    return parse_url_list(config.router)


def router_hosts(config: ServeConfig) -> tuple[str, ...]:
    return tuple(parse_host(url, "--router") for url in router_urls(config))


def parse_url_list(text: str) -> tuple[str, ...]:
    """Separated by commas, in the order given, each once."""
    urls = (url.strip().rstrip("/") for url in text.split(","))
    return tuple(dict.fromkeys(url for url in urls if url))


def parse_host(url: str, flag: str) -> str:
    """Raises `StartupError` that names what is no address of a server."""
    try:
        server = parse_server_url(url)
    except ValueError as fault:
        raise StartupError(
            f"{flag}: {url!r} is no address of a server: {fault}; it looks like http://HOST:PORT"
        ) from None
    if server.port is None:
        raise StartupError(f"{flag}: {url!r} names no port; it looks like http://HOST:PORT")
    return server.host


def check_routers(config: ServeConfig) -> None:
    """Combinations that cannot work, before anything is loaded."""
    if len(router_urls(config)) > MAX_ROUTERS:
        raise StartupError(f"--router names more than {MAX_ROUTERS} routers")
    for router in router_urls(config):
        _check_router(config, router)
    if config.advertise_url is not None:
        host = parse_host(config.advertise_url, "--advertise-url")
        if host in WILDCARDS:
            raise StartupError(
                f"--advertise-url {config.advertise_url} reaches nobody; name an address of this machine"
            )
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

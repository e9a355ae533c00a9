"""What the flags of several commands must be, said in the same words. Each check names the flag."""

import re
from typing import Any
from urllib.parse import urlsplit

from onward.config import RouterConfig, ServeConfig, otel_settings
from onward.errors import StartupError
from onward.optional_packages import require_otel
from onward.proto.field_types import MAX_DURATION_S
from onward.transport.http_urls import check_host
from onward.web.auth.allowed_hosts import ANY, normalized_host
from onward.web.auth.host_and_origin import canonical_origin

LOG_LEVELS = ("debug", "info", "warning", "error")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_port(port: int, flag: str = "--port") -> None:
    if not 0 <= port <= 65535:
        raise StartupError(f"{flag} {port} is not within 0 to 65535")


def check_log_level(level: str) -> None:
    if level.lower() not in LOG_LEVELS:
        raise StartupError(f"--log-level {level!r} is none of {', '.join(LOG_LEVELS)}")


def check_tracing(config: ServeConfig | RouterConfig) -> None:
    if config.otlp_endpoint is not None:
        _check_http_url("--otlp-endpoint", config.otlp_endpoint)
        require_otel("--otlp-endpoint")
    if config.trace_sample_ratio is not None and not 0 <= config.trace_sample_ratio <= 1:
        raise StartupError(f"--trace-sample-ratio {config.trace_sample_ratio} is not within 0 to 1")
    if config.trace_url is not None:
        _check_http_url("--trace-url", config.trace_url)
        if "{trace_id}" not in config.trace_url:
            raise StartupError(f"--trace-url {config.trace_url!r} has no {{trace_id}} in it")
    otel_settings(config.otlp_endpoint, config.trace_sample_ratio)


def _check_http_url(flag: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise StartupError(f"{flag} {url!r} is no URL that begins with http:// or https://")


def check_origins(origins: tuple[str, ...]) -> None:
    """An origin is compared letter by letter: one in another spelling than that of browsers would never match."""
    for origin in origins:
        if origin == ANY:
            continue
        try:
            sent = canonical_origin(origin)
        except ValueError as fault:
            raise StartupError(f"--cors-origin {origin!r} is no origin; {fault}") from None
        if sent != origin:
            raise StartupError(f"--cors-origin {origin!r} is no origin as browsers send it, which is {sent}")


def check_allowed_hosts(hosts: tuple[str, ...]) -> None:
    """A name or an address without a port."""
    for host in hosts:
        try:
            if host != ANY:
                check_host(normalized_host(host))
        except ValueError as fault:
            raise StartupError(f"--allowed-host {host!r} is no name of a host: {fault}") from None


def check_instance_name(name: str) -> None:
    if not _INSTANCE_NAME.fullmatch(name):
        raise StartupError(f"--instance-name {name!r} is not 1 to 64 letters, digits, dots, dashes and underscores")


def check_counts(config: Any, *names: str) -> None:
    """At least one of each, where anything is said."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise StartupError(f"{flag_of(name)} must be at least 1")


def check_not_empty(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) == "":
            raise StartupError(f"{flag_of(name)} must not be empty")


def check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= MAX_DURATION_S:
            raise StartupError(f"{flag_of(name)} must be a number, and not negative")


def check_positive_seconds(config: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and not 0 < value <= MAX_DURATION_S:
            raise StartupError(f"{flag_of(name)} must be a positive number of seconds")

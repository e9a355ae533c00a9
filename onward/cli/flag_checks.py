"""Checks of flags that several commands have, with the same error texts. Each error names the flag."""

import re
from typing import Any
from urllib.parse import urlsplit

from onward.batches.batch_policy import MAX_REQUESTS_AT_ONCE
from onward.config import RouterConfig, ServeConfig, otel_settings
from onward.errors import StartupError
from onward.optional_packages import require_otel
from onward.proto.field_types import MAX_DURATION_S
from onward.proto.router import MAX_MODEL_NAME_CHARS, MAX_MODEL_NAMES
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
        raise StartupError(f"--log-level {level!r} is not one of {', '.join(LOG_LEVELS)}")


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
        raise StartupError(f"{flag} {url!r} is not a URL that begins with http:// or https://")


def check_origins(origins: tuple[str, ...]) -> None:
    """Checks that origins are spelled as browsers send them. They are compared letter by letter, so any other spelling
    would never match."""
    for origin in origins:
        if origin == ANY:
            continue
        try:
            sent = canonical_origin(origin)
        except ValueError as fault:
            raise StartupError(f"--cors-origin {origin!r} is not an origin: {fault}") from None
        if sent != origin:
            raise StartupError(f"--cors-origin {origin!r} is not spelled as browsers send it, which is {sent}")


def check_allowed_hosts(hosts: tuple[str, ...]) -> None:
    """Checks that each host is a name or an address without a port."""
    for host in hosts:
        try:
            if host != ANY:
                check_host(normalized_host(host))
        except ValueError as fault:
            raise StartupError(f"--allowed-host {host!r} is not a host name: {fault}") from None


def check_instance_name(name: str) -> None:
    if not _INSTANCE_NAME.fullmatch(name):
        raise StartupError(f"--instance-name {name!r} is not 1 to 64 letters, digits, dots, dashes and underscores")


def check_node_name(name: str) -> None:
    if name and not _INSTANCE_NAME.fullmatch(name):
        raise StartupError(f"--node-name {name!r} is not 1 to 64 letters, digits, dots, dashes and underscores")


def check_counts(config: Any, *names: str) -> None:
    """Checks that each value is at least 1, if it is given."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise StartupError(f"{flag_of(name)} must be at least 1")


def check_not_empty(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) == "":
            raise StartupError(f"{flag_of(name)} must not be empty")


def check_model_names(config: ServeConfig) -> None:
    """Checks `--served-model-name` and `--model-alias`: clients must be able to write the names, and routers to list
    them."""
    for field_name in ("served_model_name", "model_alias"):
        names: tuple[str, ...] = getattr(config, field_name)
        for name in names:
            if not name:
                raise StartupError(f"{flag_of(field_name)} must not be empty")
            if len(name) > MAX_MODEL_NAME_CHARS or not name.isprintable():
                raise StartupError(
                    f"{flag_of(field_name)} {name[:40]!r} is not a model name: at most {MAX_MODEL_NAME_CHARS} printable "
                    "characters"
                )
        if len(names) > MAX_MODEL_NAMES:
            raise StartupError(f"{flag_of(field_name)} has {len(names)} names, more than {MAX_MODEL_NAMES}")


def check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= MAX_DURATION_S:
            raise StartupError(f"{flag_of(name)} must be a number, and not negative")


def check_positive_seconds(config: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and not 0 < value <= MAX_DURATION_S:
            raise StartupError(f"{flag_of(name)} must be a positive number of seconds")


def check_batches(config: ServeConfig | RouterConfig) -> None:
    """Checks the flags of files and batches, and creates the folder."""
    check_counts(config, "batch_max_bytes", "batch_concurrency")
    if config.batch_concurrency > MAX_REQUESTS_AT_ONCE:
        raise StartupError(f"--batch-concurrency must be at most {MAX_REQUESTS_AT_ONCE}")
    check_positive_seconds(config, "batch_ttl_s")
    check_not_empty(config, "batch_dir")
    if config.batch_dir is not None:
        from onward.batches.batch_store import BatchStore  # the HTTP packages behind it take a tenth of a second

        BatchStore(config.batch_dir).prepare()

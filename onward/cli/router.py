"""`onward router`: one address in front of many instances. Checks, listens, then `router.main` serves in this process."""

import argparse
import logging
import signal
import socket
import sys
from dataclasses import replace

from rich.console import Console

from onward import log
from onward.cli import flag_groups
from onward.cli.api_keys import check_demo, check_exposure, exposure_warnings, key_source_from_config
from onward.cli.flag_checks import (
    check_allowed_hosts,
    check_batches,
    check_counts,
    check_log_level,
    check_not_empty,
    check_not_negative,
    check_origins,
    check_port,
    check_positive_seconds,
    check_tracing,
)
from onward.cli.flags import add_grouped_flags, from_args
from onward.cli.ready_message import print_router_ready
from onward.cli.serve import listen
from onward.config import RouterConfig
from onward.errors import StartupError
from onward.router.model_routing import parse_routes
from onward.supervisor.cluster_key import read_key
from onward.supervisor.registration_config import advertised_host, http_url, parse_host, parse_url_list
from onward.transport.addresses import is_loopback
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.server.tls_files import check_tls, tls_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "onward router [flags]"
    add_grouped_flags(parser, RouterConfig, flag_groups.ROUTER)


def run(args: argparse.Namespace) -> int:
    config: RouterConfig = from_args(args, RouterConfig)
    check(config)
    key_source = key_source_from_config(config)
    # From here on the config has no plain API keys.
    config, keys = replace(config, api_key=()), key_source.read()
    check_exposure(config, keys)
    check_demo(config, keys)
    cluster_key = read_key(config.cluster_key_file)
    log.configure("router", config.log_level, config.log_format)
    for warning in exposure_warnings(config, keys):
        logging.getLogger(__name__).warning(warning)
    signal.signal(signal.SIGTERM, _leave_quietly)
    with listen(config.host, config.port, "--port") as listening:
        _serve(config, cluster_key, listening, key_source)
    logging.getLogger(__name__).info("stopped")
    return 0


def _serve(config: RouterConfig, cluster_key: str, listening: socket.socket, key_source: ApiKeySource) -> None:
    from onward.router import main

    url = http_url(advertised_host(config.host), listening.getsockname()[1], tls=config.tls_cert is not None)
    main.run(
        config, cluster_key, listening, lambda: print_router_ready(Console(highlight=False), config, url), key_source
    )


def check(config: RouterConfig) -> None:
    """Checks all that can be checked before anything is opened."""
    check_port(config.port)
    check_not_empty(config, "host")
    check_counts(config, "max_queue", "max_body_bytes", "max_connections")
    parse_routes(config.route)
    if config.preempt_retry_count < 0:
        raise StartupError(
            "--preempt-retry-count must not be negative; with 0, streams move only when their instance is drained"
        )
    check_not_negative(config, "default_max_tokens", "retry_budget", "restart_grace_s", "detach_ttl_s", "drain_s")
    check_positive_seconds(config, "stall_timeout_s", "request_timeout_s")
    check_log_level(config.log_level)
    check_tracing(config)
    check_origins(config.cors_origin)
    check_allowed_hosts(config.allowed_host)
    check_batches(config)
    if (tls := tls_files(config)) is not None:
        check_tls(tls)
    _check_reach(config)


def _check_reach(config: RouterConfig) -> None:
    """Checks that a router that communicates with other machines has a cluster key."""
    secret = (
        "so router and instances need a common secret: make one with `onward keygen FILE`, copy it to every machine, "
        "and give it to each with --cluster-key-file FILE"
    )
    for url in parse_url_list(config.instances):
        if not is_loopback(parse_host(url, "--instances")) and not config.cluster_key_file:
            raise StartupError(f"--instances: {url} is on another machine, {secret}")
    if not is_loopback(config.host) and not config.cluster_key_file:
        raise StartupError(f"--host {config.host} lets instances of other machines register, {secret}")


def _leave_quietly(_number: int, _frame: object) -> None:
    sys.exit(0)

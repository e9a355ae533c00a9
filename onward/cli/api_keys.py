"""Reads the API keys of a command from a flag, a file or the environment, and checks which keys a server must have.

The flag is for trying things out: every user of the machine can read the command lines of all processes. A file that
only its owner can read, and the environment, are for everything else.
"""

import argparse
import os
from pathlib import Path

from onward.config import API_KEY_VARIABLE, RouterConfig, ServeConfig, api_key_in_environment
from onward.errors import StartupError
from onward.supervisor.registration_config import advertised_url
from onward.supervisor.secret_file import check_secret_file
from onward.transport.addresses import is_loopback
from onward.transport.http_urls import parse_server_url
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.auth.api_key_table import ApiKeyTable

MAX_FILE_BYTES = 4096


def add_api_key_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key-file", metavar="FILE", help=f"file with the API key (default: the variable {API_KEY_VARIABLE})"
    )


def api_key_from_args(args: argparse.Namespace) -> str | None:
    """Returns the API key, if any. The command line takes precedence over the environment."""
    if args.api_key is not None and args.api_key_file is not None:
        raise StartupError("--api-key and --api-key-file are both given; leave one out")
    if args.api_key_file is not None:
        return read_api_key(args.api_key_file)
    return args.api_key if args.api_key is not None else api_key_in_environment()


def key_source_from_config(config: ServeConfig | RouterConfig) -> ApiKeySource:
    """Returns the source of all keys that a server accepts. The environment counts only if no flag gives keys."""
    plain = config.api_key
    if config.api_key_file is not None:
        plain = (*plain, read_api_key(config.api_key_file))
    if not plain and config.api_keys is None and (key := api_key_in_environment()) is not None:
        plain = (key,)
    for key in plain:
        if not key.isascii() or not key.isprintable():
            raise StartupError("--api-key must be printable ASCII: it travels in a header")
        if not key.strip() or key != key.strip():
            raise StartupError("--api-key must not be empty, nor begin or end with a space; leave it out for no key")
    return ApiKeySource(plain, config.api_keys)


def check_exposure(config: ServeConfig | RouterConfig, keys: ApiKeyTable) -> None:
    """Raises `StartupError` for a server that other machines can reach and that has no API keys, so that no server is
    exposed by accident. Also raises it if a server with API keys needs a cluster key and has none."""
    if not is_loopback(config.host) and not len(keys) and not config.insecure:
        raise StartupError(
            f"--host {config.host} can be reached from other machines, and there are no API keys: make one with "
            "`onward keys add FILE NAME` and give --api-keys FILE, or allow access without keys with --insecure"
        )
    meets_instances = isinstance(config, ServeConfig) and config.router
    meets_instances = meets_instances or (isinstance(config, RouterConfig) and not config.instances)
    if len(keys) and meets_instances and not config.cluster_key_file:
        raise StartupError(
            "with API keys, a router and its instances know each other by a common secret: make one with "
            "`onward keygen FILE`, and give it to each with --cluster-key-file FILE"
        )


def check_demo(config: ServeConfig | RouterConfig, keys: ApiKeyTable) -> None:
    """Raises `StartupError` if the buttons of `--demo`, which kill processes, would not be limited to this machine and
    to admins."""
    if not config.demo:
        return
    problem = "--demo has buttons that kill processes, so it is for this machine only"
    if not is_loopback(config.host):
        raise StartupError(f"{problem}: leave out --host {config.host}")
    for flag, names in (("--allowed-host", config.allowed_host), ("--cors-origin", config.cors_origin)):
        if names:
            raise StartupError(f"{problem}: leave out {flag} {names[0]}")
    url = advertised_url(config) if isinstance(config, ServeConfig) else None
    if url is not None and not _is_local_url(url):
        raise StartupError(f"{problem}: leave out --advertise-url {url}")
    has_cluster_key = isinstance(config, ServeConfig) and config.cluster_key_file is not None
    if not any(entry.role == "admin" for entry in keys.entries) and not has_cluster_key:
        raise StartupError("--demo needs the key of an admin: put one into a file and give --api-key-file FILE")


def _is_local_url(url: str) -> bool:
    try:
        return is_loopback(parse_server_url(url).host)
    except ValueError:
        return False


def exposure_warnings(config: RouterConfig | ServeConfig, keys: ApiKeyTable) -> list[str]:
    """Returns warnings about a host that other machines can reach, if the server has no API keys or, with keys, no
    TLS certificate."""
    if is_loopback(config.host):
        return []
    if not len(keys):
        return [f"--insecure: every client that reaches --host {config.host} may use the models, and may stop them"]
    return (
        [f"--host {config.host} without --tls-cert: keys and texts travel as they are"] if not config.tls_cert else []
    )


def read_api_key(path: str) -> str:
    """Returns the key in the first line. Raises `StartupError` for a file that has no key or is not secret."""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_FILE_BYTES)
    except OSError as fault:
        raise StartupError(f"cannot read --api-key-file {path}: {fault.strerror}") from fault
    check_secret_file(status, "--api-key-file", path)
    key = text.decode("ascii", errors="replace").partition("\n")[0].strip()
    if not key or not key.isascii() or not key.isprintable():
        raise StartupError(f"--api-key-file {path} has no key in its first line: printable ASCII, and not empty")
    return key

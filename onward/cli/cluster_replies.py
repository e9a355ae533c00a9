"""Sends a change to the `onward up` of this user on this machine, and reads its replies."""

import argparse
import select
from collections.abc import Iterator
from urllib.parse import urlsplit

from onward.cli.server_url import checked_url
from onward.errors import StartupError
from onward.proto.cluster_control import FromCluster, ToCluster
from onward.supervisor.adoption_socket import cluster_address, connect_to
from onward.transport.control_channel import ChannelClosed

DEFAULT_PORT = 8000


def add_cluster_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the cluster on this machine [%(default)s]",
    )


def cluster_replies(given_url: str, change: ToCluster) -> Iterator[FromCluster]:
    """Yields the replies to a change until the cluster closes the connection. Raises `StartupError` if there is no such
    cluster."""
    url = checked_url(given_url if "://" in given_url else f"http://{given_url}", "URL:")
    port = urlsplit(url).port or DEFAULT_PORT
    cluster = connect_to(cluster_address(port), FromCluster)
    if cluster is None:
        raise StartupError(f"no `onward up` of this user has port {port} on this machine")
    try:
        cluster.channel.send(change)
        while True:
            select.select([cluster.channel.fileno()], [], [])
            message = cluster.channel.receive()
            if message is not None:
                yield message
    except ChannelClosed:
        return
    finally:
        cluster.close()

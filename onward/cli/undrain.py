"""`onward undrain URL`: makes a drained instance take requests again."""

import argparse

from rich.console import Console

from onward.cli import admin_client
from onward.errors import NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_client.add_arguments(parser, "the instance")


def run(args: argparse.Namespace) -> int:
    server = admin_client.admin_client_from_args(args)
    try:
        server.post("/undrain")
    except NotFound as fault:
        raise NotFound(f"{fault.message}; only instances can be drained, is this one?") from None
    Console(stderr=True, highlight=False).print(f"{server.url} takes requests again", soft_wrap=True)
    return 0

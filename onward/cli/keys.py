"""`onward keys`: makes, removes and shows the keys of a file for `--api-keys`. A key is shown once, when it is made; the
file has only its hash.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onward.obs.tables import print_table
from onward.proto.api_key_entry import ApiKeyEntry
from onward.web.auth.api_key_file import add_entry, new_key, read_table, remove_entry
from onward.web.auth.api_key_table import HASH_PREFIX, LIMITS, check_limit, check_name, hash_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="create a key, print it once, and add its hash to the file")
    add.add_argument("file", type=Path, metavar="FILE", help="file of API keys")
    add.add_argument("name", metavar="NAME", help="name of the caller that will use the key; shown in logs")
    add.add_argument("--role", choices=("user", "admin"), default="user", help="what the key may do [%(default)s]")
    for limit in LIMITS:
        add.add_argument("--" + limit.replace("_", "-"), type=int, metavar="N", help=_HELP[limit])
    remove = actions.add_parser("remove", help="remove a key from the file")
    remove.add_argument("file", type=Path, metavar="FILE", help="file of API keys")
    remove.add_argument("name", metavar="NAME", help="name of the key")
    shown = actions.add_parser("list", help="show the names and limits of a file's keys")
    shown.add_argument("file", type=Path, metavar="FILE", help="file of API keys")


_HELP = {
    "max_in_flight": "maximum number of requests in progress",
    "tokens_per_minute": "maximum number of prompt and output tokens per minute",
    "priority": "best priority that its requests may ask for; smaller is served first",
    "max_connections": "maximum number of open HTTP requests, per server process",
}


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "add":
            return _add(args)
        case "remove":
            return _remove(args.file, args.name)
        case _:
            return _list(args.file)


def _add(args: argparse.Namespace) -> int:
    limits = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    for name, value in limits.items():
        check_limit(name)(value, args.name)
    key = new_key()
    digest = hash_key(key).removeprefix(HASH_PREFIX)
    add_entry(args.file, ApiKeyEntry(name=check_name(args.name, "NAME"), digest=digest, role=args.role, **limits))
    print(key)
    print(
        f"This is the key of {args.name}, and it is not shown again: {args.file} has only its hash.\n"
        f"Servers with --api-keys {args.file} accept it after their next start, or after SIGHUP.",
        file=sys.stderr,
    )
    return 0


def _remove(file: Path, name: str) -> int:
    remove_entry(file, name)
    print(
        f"Servers with --api-keys {file} refuse the key of {name} after their next start, or after SIGHUP.",
        file=sys.stderr,
    )
    return 0


def _list(file: Path) -> int:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("name", "role", *(limit.replace("_", " ") for limit in LIMITS)):
        table.add_column(title, no_wrap=True)
    for entry in read_table(file):
        limits = [getattr(entry, name) for name in LIMITS]
        table.add_row(entry.name, entry.role, *("" if value is None else str(value) for value in limits))
    print_table(Console(highlight=False), table)
    return 0

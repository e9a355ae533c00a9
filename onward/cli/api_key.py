"""Where a command finds the API key: in a flag, in a file, or in the environment.

A flag is for trying things out: whoever is on the machine can read the command lines of everybody's processes. A file that
only its owner can read, and the environment, are for everything else.
"""

import argparse
import os
import stat
from pathlib import Path

from onward.config import API_KEY_VARIABLE, api_key_in_environment
from onward.errors import StartupError

MAX_FILE_BYTES = 4096


def add_api_key_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--api-key-file", metavar="FILE", help=f"has the API key; so may {API_KEY_VARIABLE}")


def api_key_of(args: argparse.Namespace) -> str | None:
    """What is said on the command line counts more than what is in the environment."""
    if args.api_key is not None and args.api_key_file is not None:
        raise StartupError("--api-key and --api-key-file are both given; leave one out")
    if args.api_key_file is not None:
        return read_api_key(args.api_key_file)
    return args.api_key if args.api_key is not None else api_key_in_environment()


def read_api_key(path: str) -> str:
    """The first line. Raises `StartupError` for a file that has none, or is no secret."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES)
    except OSError as fault:
        raise StartupError(f"cannot read --api-key-file {path}: {fault.strerror}") from fault
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartupError(f"others can read --api-key-file {path}; close it to them: chmod 600 {path}")
    key = text.decode("ascii", errors="replace").partition("\n")[0].strip()
    if not key or not key.isascii() or not key.isprintable():
        raise StartupError(f"--api-key-file {path} has no key in its first line: printable ASCII, and not empty")
    return key

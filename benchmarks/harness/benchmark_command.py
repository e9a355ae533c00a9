"""What the `make bench-…` commands share: how they begin, where their figures go, and how they end.

Knows nothing of what is measured.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console

from benchmarks import ROOT
from onward.errors import OnwardError


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="FOLDER", help="[bench-results]")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as JSON to the output, the rest to stderr")


def begin(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as with Ctrl-C, the processes are stopped first
    folder.mkdir(parents=True, exist_ok=True)


def console(*, output_is_json: bool = False) -> Console:
    """Returns the console for progress."""
    return Console(highlight=False, soft_wrap=True, stderr=output_is_json)


def write(name: str, document: dict[str, Any], folder: Path) -> Path:
    file = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return file


def run(name: str, main: Callable[[], int]) -> NoReturn:
    try:
        sys.exit(main())
    except OnwardError as fault:
        sys.exit(f"make {name}: {fault.message}")

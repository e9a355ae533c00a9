"""Arguments of the benchmarks that load one api process with short and long streams."""

import argparse

SHORT_TOKENS = 16
"""Length of a short stream."""


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--connections", type=int, default=256, metavar="N", help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each stream [%(default)s]")
    parser.add_argument("--short-requests", type=int, default=2, metavar="N", help="of each connection [%(default)s]")
    parser.add_argument("--interval-ms", type=float, default=20.0, metavar="MS", help="between steps [%(default)s]")


def check_load_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if min(args.rounds, args.connections, args.short_requests) < 1 or args.tokens <= SHORT_TOKENS:
        parser.error(f"counts must be at least 1, and --tokens more than {SHORT_TOKENS}")

"""`onward keygen`: makes the secret that instances on several machines share."""

import argparse
from pathlib import Path

from onward.supervisor.cluster_key import write_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="file to create; an existing file is not overwritten")


def run(args: argparse.Namespace) -> int:
    write_key(args.file)
    print(
        f"{args.file} holds a new cluster key. Copy it to every machine of the cluster, readable by its owner only,\n"
        f"and start each instance with --cluster-key-file {args.file}. Every server with this file can join the cluster."
    )
    return 0

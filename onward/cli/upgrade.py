"""`onward upgrade URL`: replaces the instances of an `onward up` on this machine, one after the other, by new processes.

Exit status 0: all are replaced. 1: one could not be replaced; this instance and the ones after it run as before.
"""

import argparse

from rich.console import Console

from onward.cli.cluster_replies import add_cluster_url, cluster_replies
from onward.errors import StartupError
from onward.proto.cluster_control import MemberUpgraded, UpgradeEnded, UpgradeInstances


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_url(parser)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    for message in cluster_replies(args.url, UpgradeInstances()):
        match message:
            case MemberUpgraded(name, ""):
                console.print(f"{name} is replaced", soft_wrap=True)
            case UpgradeEnded(error) if error:
                raise StartupError(error)
            case UpgradeEnded():
                return 0
            case _:
                pass
    raise StartupError("the cluster has ended")

"""`onward scale URL`: changes the number of instances of an `onward up` on this machine, under load.

New instances are ready before others are removed. A removed instance is drained first. Exit status 0: the cluster has these
numbers. 1: it was refused, or an instance could not be started; none was removed then.
"""

import argparse

from rich.console import Console

from onward.cli.cluster_replies import add_cluster_url, cluster_replies
from onward.errors import InvalidRequest, StartupError
from onward.proto.cluster_control import InstanceAdded, InstanceRemoved, ScaleEnded, ScaleInstances
from onward.supervisor.scale_change import ROLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_url(parser)
    for role in ROLES:
        parser.add_argument(f"--{role}", type=int, metavar="N", help=f"number of {role} instances from now on")
    parser.add_argument("--model", default="", metavar="NAME", help="the model whose instances these are [each model]")


def run(args: argparse.Namespace) -> int:
    counts = {role: getattr(args, role) for role in ROLES if getattr(args, role) is not None}
    if not counts:
        raise InvalidRequest("give a number of instances with --prefill, --decode or --mixed", param="mixed")
    for role, number in counts.items():
        if number < 0:
            raise InvalidRequest(f"--{role} must not be negative", param=role)
    console = Console(stderr=True, highlight=False)
    for message in cluster_replies(args.url, ScaleInstances(counts, args.model)):
        match message:
            case InstanceAdded(name):
                console.print(f"{name} is added", soft_wrap=True)
            case InstanceRemoved(name):
                console.print(f"{name} is removed", soft_wrap=True)
            case ScaleEnded(error) if error:
                raise StartupError(error)
            case ScaleEnded():
                return 0
            case _:
                pass
    raise StartupError("the cluster has ended")

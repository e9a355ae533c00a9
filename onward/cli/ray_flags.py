"""The flags of `onward up` for a cluster on Ray."""

import argparse
import math
from dataclasses import dataclass

from onward.errors import StartupError
from onward.optional_packages import require_ray

NODE_TIMEOUT_S = 2.0
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RayOptions:
    address: str
    node_timeout_s: float
    gpus_per_rank: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster on Ray")
    group.add_argument(
        "--ray",
        nargs="?",
        const=LOCAL,
        metavar="ADDRESS",
        help="run the instances on the nodes of the Ray cluster at ADDRESS, for example 10.0.0.1:6379 or auto; without "
        "ADDRESS on a new one on this machine",
    )
    group.add_argument(
        "--node-timeout-s",
        type=float,
        metavar="SECONDS",
        help=f"after which silence a new Ray cluster gives a node up [{NODE_TIMEOUT_S:g}]",
    )
    group.add_argument("--gpus-per-rank", type=float, metavar="N", help="GPUs that Ray reserves for each rank [0]")


def check(args: argparse.Namespace) -> None:
    """Raises `StartupError` for flags that cannot work together."""
    if args.ray is None:
        for name in ("node_timeout_s", "gpus_per_rank"):
            if getattr(args, name) is not None:
                raise StartupError(f"--{name.replace('_', '-')} is for a cluster on Ray: give --ray too")
        return
    require_ray("--ray")
    if args.ray not in (LOCAL, "auto") and not args.ray.rpartition(":")[2].isdigit():
        raise StartupError(f"--ray {args.ray!r} is not an address; it looks like HOST:PORT or auto")
    if not args.with_router:
        raise StartupError("--ray needs a router, and --no-router leaves it out")
    if args.kv_port:
        raise StartupError("--kv-port cannot be given with --ray: several instances may share a node")
    if args.ray != LOCAL and args.node_timeout_s is not None:
        raise StartupError(
            "--node-timeout-s is for a new Ray cluster; one that runs has it from RAY_health_check_period_ms, "
            "RAY_health_check_timeout_ms and RAY_health_check_failure_threshold of its `ray start --head`"
        )
    if not 0 < (NODE_TIMEOUT_S if args.node_timeout_s is None else args.node_timeout_s) < math.inf:
        raise StartupError("--node-timeout-s must be a positive number of seconds")
    if not 0 <= (args.gpus_per_rank or 0.0) < math.inf:
        raise StartupError("--gpus-per-rank must not be negative")


def options_from_args(args: argparse.Namespace) -> RayOptions:
    timeout_s = NODE_TIMEOUT_S if args.node_timeout_s is None else args.node_timeout_s
    return RayOptions(args.ray, timeout_s, args.gpus_per_rank or 0.0)

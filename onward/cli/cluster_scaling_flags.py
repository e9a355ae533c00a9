"""The flags of `onward up` about the number of instances while the cluster runs, and what is made of them."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from onward.cli.admin_client import AdminClient
from onward.cli.cluster_plan import InstanceCounts, ServedModel, check_instance_counts
from onward.cli.status import STATUS_PATH
from onward.errors import OnwardError, StartupError
from onward.supervisor.cluster_key import read_key
from onward.supervisor.cluster_load import load_by_model
from onward.supervisor.cluster_scaling import ClusterScaling, LoadScaling
from onward.supervisor.scale_change import MemberOperations
from onward.supervisor.scaling_policy import LoadFigures, ScalingLimits, ScalingPolicy

READ_TIMEOUT_S = 0.5
"""Limit of each wait for the router. The cluster's processes are not watched meanwhile."""
UP_AFTER_S, DOWN_AFTER_S = 5.0, 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scaling by load")
    group.add_argument("--min", type=int, metavar="N", help="fewest instances of each model that take requests [1]")
    group.add_argument(
        "--max", type=int, metavar="N", help="most of them; the load decides how many there are (default: no scaling)"
    )
    group.add_argument(
        "--scale-up-after-s",
        type=float,
        metavar="SECONDS",
        help=f"for how long the load is high before instances are added [{UP_AFTER_S:g}]",
    )
    group.add_argument(
        "--scale-down-after-s",
        type=float,
        metavar="SECONDS",
        help=f"for how long the load is low before an instance is removed [{DOWN_AFTER_S:g}]",
    )


def limits_from_args(args: argparse.Namespace, counts: InstanceCounts, num_models: int) -> ScalingLimits | None:
    """Returns None if the number of instances does not depend on the load."""
    if args.max is None:
        for flag in ("min", "scale_up_after_s", "scale_down_after_s"):
            if getattr(args, flag) is not None:
                raise StartupError(f"--{flag.replace('_', '-')} is for scaling by load: give --max too")
        return None
    if not args.with_router:
        raise StartupError("--max needs a router, whose figures decide, and --no-router leaves it out")
    minimum = 1 if args.min is None else args.min
    if not 1 <= minimum <= args.max:
        raise StartupError(
            f"--min {minimum} and --max {args.max}: the first must be at least 1, and not above the second"
        )
    limits = ScalingLimits(
        minimum,
        args.max,
        _seconds(args.scale_up_after_s, UP_AFTER_S, "--scale-up-after-s"),
        _seconds(args.scale_down_after_s, DOWN_AFTER_S, "--scale-down-after-s"),
    )
    _at_maximum(counts, limits, num_models).check_total()
    return limits


def scaled_role(counts: InstanceCounts) -> str:
    """Returns the role of the instances that the load adds and removes."""
    return "decode" if counts.decode else "mixed"


def max_instances(counts: InstanceCounts, limits: ScalingLimits | None, num_models: int) -> int:
    """Returns the largest number of instances that there are at once without `onward scale`."""
    return counts.total if limits is None else max(counts.total, _at_maximum(counts, limits, num_models).total)


def _at_maximum(counts: InstanceCounts, limits: ScalingLimits, num_models: int) -> InstanceCounts:
    number = limits.maximum * num_models
    if scaled_role(counts) == "decode":
        return InstanceCounts(counts.prefill, number, counts.mixed)
    return InstanceCounts(counts.prefill, counts.decode, number)


def _seconds(given: float | None, default: float, flag: str) -> float:
    if given is None:
        return default
    if not 0 <= given < math.inf:
        raise StartupError(f"{flag} must be a number of seconds, and not negative")
    return given


@dataclass(slots=True, frozen=True)
class ScalingFactory:
    """Makes the scaling of a cluster behind a router."""

    models: Sequence[ServedModel]
    limits: ScalingLimits | None
    counts: InstanceCounts
    device: str
    router_url: str
    key_file: str

    def __call__(self, cluster: MemberOperations) -> ClusterScaling:
        names = [model.name for model in self.models]
        if self.limits is None:
            return ClusterScaling(cluster, names, self._check_counts)
        policies = {name: ScalingPolicy(self.limits) for name in names}
        by_load = LoadScaling(scaled_role(self.counts), policies, self._read_load)
        return ClusterScaling(cluster, names, self._check_counts, by_load)

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        check_instance_counts(InstanceCounts(counts["prefill"], counts["decode"], counts["mixed"]), self.device)

    def _read_load(self) -> dict[str, LoadFigures]:
        """Returns the load of each model, and none if the router does not answer or cannot be asked."""
        try:
            router = AdminClient(self.router_url, cluster_key=read_key(self.key_file), timeout_s=READ_TIMEOUT_S)
            return load_by_model(router.get(STATUS_PATH))
        except (OnwardError, msgspec.ValidationError):
            return {}

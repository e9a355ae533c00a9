"""Deliberate bugs in changes of the number of instances of a cluster."""

import signal
from collections.abc import Callable

from onward.supervisor import scale_change, scaling_policy
from onward.supervisor.cluster_member import ClusterMember
from onward.supervisor.local_cluster import LocalCluster
from onward.supervisor.scale_change import ScalableMember, ScaleChange
from tests.sabotage.patches import Patches, Sabotage

SCALING = "tests/supervisor/test_scaling.py::"
POLICY = "tests/supervisor/test_scaling_policy.py::"
CHANGE = "tests/supervisor/test_scale_change.py::"


def _kill_instead_of_draining(patch: Patches) -> None:
    def remove(original: Callable, self: LocalCluster, member: ClusterMember) -> None:
        original(self, member)
        if member.process is not None:
            member.process.send_signal(signal.SIGKILL)

    patch.around(LocalCluster, "remove_member", remove)


def _restart_instances_that_leave(patch: Patches) -> None:
    def remove(original: Callable, self: LocalCluster, member: ClusterMember) -> None:
        original(self, member)
        member.is_leaving = False

    patch.around(LocalCluster, "remove_member", remove)


def _remove_all_roles_together(patch: Patches) -> None:
    patch.put(scale_change, "REMOVAL_ORDER", (("prefill", "decode", "mixed"),))


def _remove_without_replacement(patch: Patches) -> None:
    def on_lost(original: Callable, self: ScaleChange, member: ScalableMember, reason: str) -> None:
        original(self, member, reason)
        self.error = ""

    patch.around(ScaleChange, "on_lost", on_lost)


def _remove_at_the_bound_at_which_instances_are_added(patch: Patches) -> None:
    patch.put(scaling_policy, "LOW_USAGE", 2.0)


def _do_not_wait_for_those_that_stay(patch: Patches) -> None:
    patch.put(ScaleChange, "_model_at_risk", lambda self: None)


TABLE = [
    Sabotage(
        "removed-instance-not-drained",
        "an instance that is removed is killed, and not drained",
        _kill_instead_of_draining,
        [SCALING + "test_prefill_instances_are_removed_after_the_others_have_gone"],
    ),
    Sabotage(
        "removed-instance-restarted",
        "an instance that is removed is started again when it has ended",
        _restart_instances_that_leave,
        [SCALING + "test_a_removed_instance_that_dies_is_not_started_again_and_one_that_stays_is"],
    ),
    Sabotage(
        "prefill-removed-first",
        "prefill instances end while decode instances still wait for them",
        _remove_all_roles_together,
        [SCALING + "test_prefill_instances_are_removed_after_the_others_have_gone"],
    ),
    Sabotage(
        "removed-without-replacement",
        "instances are removed although those that replace them cannot be started",
        _remove_without_replacement,
        [SCALING + "test_an_instance_that_cannot_be_added_ends_the_change_and_nothing_else"],
    ),
    Sabotage(
        "last-ready-instance-removed",
        "the last ready instance is removed, although those that stay are not ready",
        _do_not_wait_for_those_that_stay,
        [CHANGE + "test_the_last_ready_instance_is_removed_only_when_one_that_stays_is_ready"],
    ),
    Sabotage(
        "scaling-without-hysteresis",
        "a constant load adds and removes instances in turn",
        _remove_at_the_bound_at_which_instances_are_added,
        [POLICY + "test_a_constant_load_reaches_a_number_and_stays_there"],
    ),
]

"""Deliberate bugs in a cluster on Ray."""

from collections.abc import Callable
from typing import Any

from onward.ray import node_guard
from onward.ray.ray_cluster import RayCluster
from tests.sabotage.patches import Patches, Sabotage

GUARD = "tests/ray/test_guarded_command.py::"
CLUSTER = "tests/ray/test_ray_cluster.py::"


def _watch_the_actor_only(patch: Patches) -> None:
    def watch(original: Callable, raylet_pid: int, actor_pid: int) -> list[int]:
        return original(raylet_pid, actor_pid)[1:]

    patch.around(node_guard, "watch_node", watch)


def _leave_the_command_alone(patch: Patches) -> None:
    patch.put(node_guard, "exit_with_parent", lambda pid: None)


def _forget_hangups(patch: Patches) -> None:
    def on_hangup(_original: Callable, _self: RayCluster, *_: Any) -> None:
        pass

    patch.around(RayCluster, "_on_hangup", on_hangup)


TABLE = [
    Sabotage(
        "instance-outlives-raylet",
        "an instance stays when the raylet of its node has died alone",
        _watch_the_actor_only,
        [GUARD + "test_a_command_ends_when_the_raylet_alone_has_died"],
    ),
    Sabotage(
        "instance-outlives-guard",
        "an instance stays when its guard was killed",
        _leave_the_command_alone,
        [GUARD + "test_a_command_ends_when_its_guard_is_killed"],
    ),
    Sabotage(
        "keys-not-reloaded-on-ray",
        "a SIGHUP of a cluster on Ray does not reach the router, so removed keys stay valid",
        _forget_hangups,
        [CLUSTER + "test_a_hangup_reaches_those_who_have_a_file_of_keys_once_they_are_ready"],
    ),
]

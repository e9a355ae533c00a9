"""Messages between an `onward up` and the commands that change it while it runs (`onward upgrade`, `onward scale`), on
one machine.

    command                 cluster
    UpgradeInstances  ->
                      <-    MemberUpgraded, for each instance
                      <-    UpgradeEnded

    ScaleInstances    ->
                      <-    InstanceAdded, InstanceRemoved, for each of them
                      <-    ScaleEnded

A command that closes the connection earlier does not end the change.
"""

import msgspec

from onward.proto.field_types import Count


class UpgradeInstances(msgspec.Struct, frozen=True, tag="upgrade_instances"):
    """Replace all instances, one after the other, by new processes."""


class MemberUpgraded(msgspec.Struct, frozen=True, tag="member_upgraded"):
    """A new process has taken over from an instance's old one, or could not."""

    name: str
    error: str = ""
    """Why the old process goes on; empty: it was replaced."""


class UpgradeEnded(msgspec.Struct, frozen=True, tag="upgrade_ended"):
    error: str = ""
    """Why it was not begun, or stopped before all instances were replaced."""


class ScaleInstances(msgspec.Struct, frozen=True, tag="scale_instances"):
    counts: dict[str, Count]
    """The number of instances of each role that is to change."""
    model: str = ""
    """The model whose instances these are. Empty: those of every model."""


class InstanceAdded(msgspec.Struct, frozen=True, tag="instance_added"):
    name: str


class InstanceRemoved(msgspec.Struct, frozen=True, tag="instance_removed"):
    name: str


class ScaleEnded(msgspec.Struct, frozen=True, tag="scale_ended"):
    error: str = ""
    """Why the numbers were not changed, or not as requested."""


ToCluster = UpgradeInstances | ScaleInstances
FromCluster = MemberUpgraded | UpgradeEnded | InstanceAdded | InstanceRemoved | ScaleEnded

"""Which instances a change of their number removes while some are not ready, at a stand-in for the cluster."""

from dataclasses import dataclass, field

from onward.supervisor.cluster_member import MemberSpec
from onward.supervisor.scale_change import START_TIMEOUT_S, ScaleChange


@dataclass(eq=False)
class Member:
    spec: MemberSpec
    is_ready: bool = True
    is_leaving: bool = False


@dataclass
class Members:
    """A cluster whose instances leave at once, and where none can be added."""

    members: list[Member] = field(default_factory=list)

    def members_now(self) -> list[Member]:
        return list(self.members)

    def add_member(self, role: str, model: str) -> Member:
        raise AssertionError("nothing is added")

    def remove_member(self, member: Member) -> None:
        self.members.remove(member)

    @property
    def names(self) -> list[str]:
        return [member.spec.name for member in self.members]


def members(**is_ready: bool) -> Members:
    """Instances by name, with `_` for `-`."""
    specs = [MemberSpec(name.replace("_", "-"), name.split("_")[0], (), "", None, 1) for name in is_ready]
    return Members([Member(spec, is_ready[spec.name.replace("-", "_")]) for spec in specs])


def change(cluster: Members, **counts: int) -> ScaleChange:
    return ScaleChange({(role, ""): number for role, number in counts.items()}, cluster)  # type: ignore[arg-type]


def test_an_instance_that_is_not_ready_is_removed_before_one_that_is() -> None:
    cluster = members(mixed_0=False, mixed_1=True, mixed_2=True, mixed_3=False)
    down = change(cluster, mixed=1)
    while not down.advance(0.0):
        pass
    assert (cluster.names, down.error) == (["mixed-1"], "")


def test_the_last_ready_instance_is_removed_only_when_one_that_stays_is_ready() -> None:
    cluster = members(decode_0=False, mixed_0=True)
    swap = change(cluster, decode=1, mixed=0)
    assert not swap.advance(0.0) and not swap.advance(START_TIMEOUT_S - 1)
    assert cluster.names == ["decode-0", "mixed-0"]
    cluster.members[0].is_ready = True
    while not swap.advance(START_TIMEOUT_S - 1):
        pass
    assert (cluster.names, swap.error) == (["decode-0"], "")


def test_the_wait_for_an_instance_that_stays_has_an_end() -> None:
    cluster = members(decode_0=False, mixed_0=True)
    swap = change(cluster, decode=1, mixed=0)
    assert not swap.advance(0.0)
    assert swap.advance(START_TIMEOUT_S)
    assert cluster.names == ["decode-0", "mixed-0"]
    assert swap.error == f"no instance that stays has been ready for {START_TIMEOUT_S:g} s"

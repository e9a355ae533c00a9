"""The number of instances of a running cluster changes, with small scripts in the place of instances."""

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from onward.cli.cluster_plan import InstanceCounts, check_instance_counts, free_name
from onward.clock import SystemClock
from onward.proto.cluster_control import (
    FromCluster,
    InstanceAdded,
    InstanceRemoved,
    ScaleEnded,
    ScaleInstances,
    ToCluster,
    UpgradeEnded,
    UpgradeInstances,
)
from onward.supervisor.adoption_socket import AdoptionPeer, cluster_address, connect_to
from onward.supervisor.cluster_member import ClusterMember, MemberSpec
from onward.supervisor.cluster_scaling import ClusterScaling, LoadScaling
from onward.supervisor.local_cluster import LocalCluster
from onward.supervisor.scaling_policy import LoadFigures, ScalingLimits, ScalingPolicy
from tests.supervisor.test_local_cluster import READY, WAIT, instance, signal_handlers, stop

__all__ = ["signal_handlers"]
WAIT_S = 30.0
SERVE = f"{READY}; {WAIT}"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process gets meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Planner:
    """Plans scripts, and remembers which names are reserved."""

    def __init__(self, script: str = SERVE) -> None:
        self.script, self.reserved = script, ["mixed-0"]

    def plan_member(self, role: str, model: str, members: Sequence[ClusterMember]) -> MemberSpec:
        name = free_name(role, [member.spec.name for member in members])
        self.reserved.append(name)
        return replace(instance(name, self.script), model=model)

    def release(self, spec: MemberSpec) -> None:
        self.reserved.remove(spec.name)


def check_counts(counts: Mapping[str, int]) -> None:
    check_instance_counts(InstanceCounts(counts["prefill"], counts["decode"], counts["mixed"]), "cpu")


def cluster_of(
    port: int | None,
    planner: Planner,
    *specs: MemberSpec,
    on_ready: Callable[[LocalCluster], None],
    on_line: Callable[[str, str], None] = lambda name, line: None,
    by_load: LoadScaling | None = None,
    models: Sequence[str] = ("",),
) -> LocalCluster:
    return LocalCluster(
        specs,
        SystemClock(),
        inherit_fds=(),
        ready_prefix="  Onward ",
        drain_s=WAIT_S,
        on_line=on_line,
        on_ready=on_ready,
        control_port=port,
        planner=planner,
        new_scaling=lambda cluster: ClusterScaling(cluster, models, check_counts, by_load),
    )


class Command:
    """A connected command."""

    def __init__(self, port: int) -> None:
        peer = connect_to(cluster_address(port), FromCluster)
        assert peer is not None
        self._peer: AdoptionPeer = peer

    def send(self, change: ToCluster) -> None:
        self._peer.channel.send(change)

    def replies(self) -> list[object]:
        """All replies up to the end of the change."""
        messages: list[object] = []
        while not (messages and isinstance(messages[-1], ScaleEnded | UpgradeEnded)):
            assert select.select([self._peer.channel.fileno()], [], [], WAIT_S)[0]
            messages.append(self._peer.channel.receive())
        self._peer.close()
        return messages


def run_changes(
    port: int, planner: Planner, *changes: ToCluster, specs: Sequence[MemberSpec] = (), **more
) -> tuple[LocalCluster, list[list[object]]]:
    """Requests one change after the other of a cluster, and returns the cluster after its end with all replies."""
    replies: list[list[object]] = []

    def request_all() -> None:
        try:
            for change in changes:
                command = Command(port)
                command.send(change)
                replies.append(command.replies())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=request_all)
    cluster = cluster_of(
        port, planner, *(specs or [instance("mixed-0", SERVE)]), on_ready=lambda _: thread.start(), **more
    )
    cluster.run()
    thread.join()
    return cluster, replies


def test_instances_are_added_and_the_newest_ones_removed(port: int) -> None:
    planner = Planner()
    cluster, [up, down] = run_changes(port, planner, ScaleInstances({"mixed": 3}), ScaleInstances({"mixed": 1}))
    assert {*up[:-1]} == {InstanceAdded("mixed-1"), InstanceAdded("mixed-2")} and up[-1] == ScaleEnded()
    assert {*down[:-1]} == {InstanceRemoved("mixed-1"), InstanceRemoved("mixed-2")} and down[-1] == ScaleEnded()
    assert [member.spec.name for member in cluster.members] == planner.reserved == ["mixed-0"]


def test_prefill_instances_are_removed_after_the_others_have_gone(port: int) -> None:
    """Each says so when it is asked to leave, and takes its time."""
    lines: list[str] = []
    leave = "lambda *_: (print('asked', file=sys.stderr, flush=True), time.sleep(0.2), sys.exit('left'))"
    script = f"import signal, sys, time; signal.signal(signal.SIGTERM, {leave}); {SERVE}"
    specs = [instance(name, script) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    planner = Planner()
    planner.reserved = [spec.name for spec in specs]
    _, [replies] = run_changes(
        port,
        planner,
        ScaleInstances({"prefill": 1, "decode": 1}),
        specs=specs,
        on_line=lambda name, line: lines.append(f"{name} {line}"),
    )
    assert replies == [InstanceRemoved("decode-1"), InstanceRemoved("prefill-1"), ScaleEnded()]
    assert lines[:4] == ["decode-1 asked", "decode-1 left", "prefill-1 asked", "prefill-1 left"]


def test_an_instance_that_cannot_be_added_ends_the_change_and_nothing_else(port: int) -> None:
    planner = Planner("import sys; sys.exit('onward serve: no memory')")
    cluster, [replies] = run_changes(
        port, planner, ScaleInstances({"mixed": 0, "decode": 1}), specs=[instance("mixed-0", SERVE)]
    )
    assert replies == [ScaleEnded("decode-0 cannot start: no memory")], "no instance is removed after this"
    assert [member.spec.name for member in cluster.members] == planner.reserved == ["mixed-0"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (ScaleInstances({"mixed": 0}), "no instance would take requests"),
        (ScaleInstances({"prefill": 1}), "--prefill instances work for decode instances"),
        (ScaleInstances({"mixed": 65}), "65 instances are more than the 64"),
        (ScaleInstances({"router": 2}), "there are no 'router' instances"),
        (ScaleInstances({"mixed": 2}, "n"), "--model 'n' is not served here"),
    ],
)
def test_numbers_that_a_cluster_cannot_have_are_refused(port: int, change: ScaleInstances, named: str) -> None:
    _, [[ended]] = run_changes(port, Planner(), change)
    assert isinstance(ended, ScaleEnded) and named in ended.error


def test_a_model_is_scaled_without_the_others(port: int) -> None:
    planner = Planner()
    planner.reserved = ["mixed-0", "mixed-1"]
    specs = [replace(instance(f"mixed-{i}", SERVE), model=model) for i, model in enumerate("ab")]
    cluster, [replies] = run_changes(port, planner, ScaleInstances({"mixed": 2}, "b"), specs=specs, models=("a", "b"))
    assert replies == [InstanceAdded("mixed-2"), ScaleEnded()]
    assert [member.spec.model for member in cluster.members] == ["a", "b", "b"]


def test_one_change_at_a_time(port: int) -> None:
    """The new instance never gets ready, so the change goes on until the cluster is stopped."""
    replies: list[list[object]] = []

    def request_all() -> None:
        first = Command(port)
        first.send(ScaleInstances({"mixed": 2}))
        started.wait(WAIT_S)
        for change in (ScaleInstances({"mixed": 3}), UpgradeInstances()):
            command = Command(port)
            command.send(change)
            replies.append(command.replies())
        os.kill(os.getpid(), signal.SIGTERM)
        replies.append(first.replies())

    started = threading.Event()
    thread = threading.Thread(target=request_all)
    cluster_of(
        port,
        Planner(f"import sys; print('starts', file=sys.stderr, flush=True); {WAIT}"),
        instance("mixed-0", SERVE),
        on_ready=lambda _: thread.start(),
        on_line=lambda *_: started.set(),
    ).run()
    thread.join()
    assert replies == [
        [ScaleEnded("the number of instances is being changed already; wait until that has ended")],
        [UpgradeEnded("the number of instances is being changed; wait until that has ended")],
        [ScaleEnded("the cluster is being stopped")],
    ]


def test_a_removed_instance_that_dies_is_not_started_again_and_one_that_stays_is(port: int) -> None:
    starts: list[str] = []
    script = f"import sys; print('up', file=sys.stderr, flush=True); {SERVE}"

    def on_line(name: str, _: str) -> None:
        starts.append(name)
        if starts.count("mixed-0") == 2:
            stop(cluster)

    def on_ready(made: LocalCluster) -> None:
        kept, removed = made.members
        made.remove_member(removed)
        assert kept.process is not None and removed.process is not None
        removed.process.kill()
        os.waitid(os.P_PID, removed.process.pid, os.WEXITED | os.WNOWAIT)  # so that both ends are noticed together
        kept.process.kill()

    planner = Planner()
    planner.reserved.append("mixed-1")
    specs = [instance("mixed-0", script), instance("mixed-1", script)]
    cluster = cluster_of(port, planner, *specs, on_ready=on_ready, on_line=on_line)
    cluster.run()
    assert sorted(starts) == ["mixed-0", "mixed-0", "mixed-1"]
    assert [member.spec.name for member in cluster.members] == planner.reserved == ["mixed-0"]


def test_the_load_adds_instances_and_removes_them_again(port: int) -> None:
    """The load is high until three are ready, and then there is none."""

    class FallingLoad:
        has_fallen = False

        def __call__(self) -> Mapping[str, LoadFigures]:
            num_ready = sum(member.is_ready for member in cluster.members)
            self.has_fallen |= num_ready == 3
            if self.has_fallen and num_ready == 1:
                stop(cluster)
            num_slots = 10 * num_ready
            return {"": LoadFigures(num_ready, 0 if self.has_fallen else num_slots, max_running=num_slots)}

    planner, numbers = Planner(), []
    policy = ScalingPolicy(ScalingLimits(1, 3, up_after_s=0.0, down_after_s=0.0))
    cluster = cluster_of(
        port,
        planner,
        instance("mixed-0", f"import sys; {SERVE}"),
        on_ready=lambda made: numbers.append(len(made.members)),
        by_load=LoadScaling("mixed", {"": policy}, FallingLoad()),
    )
    cluster.run()
    assert numbers == [1]
    assert [member.spec.name for member in cluster.members] == planner.reserved == ["mixed-0"]


def test_instances_that_are_scaled_by_load_are_not_scaled_by_hand(port: int) -> None:
    by_load = LoadScaling("mixed", {"": ScalingPolicy(ScalingLimits(1, 3))}, dict)
    _, [[ended]] = run_changes(port, Planner(), ScaleInstances({"mixed": 2}), by_load=by_load)
    assert ended == ScaleEnded("mixed instances are scaled by load, between --min 1 and --max 3")


def test_a_command_that_says_nothing_does_not_keep_others_waiting(port: int) -> None:
    silent: list[Command] = []

    replies: list[list[object]] = []

    def request() -> None:
        silent.append(Command(port))
        command = Command(port)
        command.send(ScaleInstances({"mixed": 2}))
        replies.append(command.replies())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=request)
    cluster_of(port, Planner(), instance("mixed-0", SERVE), on_ready=lambda _: thread.start()).run()
    thread.join()
    assert replies == [[InstanceAdded("mixed-1"), ScaleEnded()]]
    silent[0]._peer.close()

"""`onward upgrade` as the cluster carries it out, with small scripts in the place of instances."""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from onward.proto.cluster_control import FromCluster, MemberUpgraded, UpgradeEnded, UpgradeInstances
from onward.supervisor.adoption_socket import AdoptionPeer, cluster_address, connect_to
from onward.supervisor.cluster_member import ClusterMember, MemberSpec
from onward.supervisor.local_cluster import LocalCluster
from onward.supervisor.rolling_upgrade import START_TIMEOUT_S, RollingUpgrade
from onward.transport.control_channel import ControlChannel
from tests.supervisor.test_local_cluster import READY, WAIT, cluster_of, instance, signal_handlers, stop

__all__ = ["signal_handlers"]
WAIT_S = 30.0


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process gets meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Requester:
    """`onward upgrade`: reads what the cluster reports until the upgrade has ended, then stops the cluster."""

    def __init__(self, port: int, *, stops: bool = True) -> None:
        peer = connect_to(cluster_address(port), FromCluster)
        assert peer is not None
        peer.channel.send(UpgradeInstances())
        self.messages: list[object] = []
        self._peer, self._stops = peer, stops
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not (self.messages and isinstance(self.messages[-1], UpgradeEnded)):
            assert select.select([self._peer.channel.fileno()], [], [], WAIT_S)[0]
            self.messages.append(self._peer.channel.receive())
        self._peer.close()
        if self._stops:
            os.kill(os.getpid(), signal.SIGTERM)

    def join(self) -> None:
        self._thread.join()


def test_a_new_process_that_the_system_refuses_to_start_ends_the_upgrade_and_nothing_else(
    tmp_path: Path, port: int
) -> None:
    program = tmp_path / "instance"
    program.write_text(f"#!{sys.executable}\n{READY}; {WAIT}\n")
    program.chmod(0o700)
    requesters: list[Requester] = []
    pids: list[int] = []

    def on_ready(made: LocalCluster) -> None:
        pids.extend(member.process.pid for member in made.members if member.process is not None)
        program.unlink()
        requesters.append(Requester(port))

    spec = replace(instance("mixed-0", ""), command=(str(program),))
    cluster = cluster_of(spec, on_ready=on_ready, control_port=port)
    cluster.run()
    requesters[0].join()
    failed, ended = requesters[0].messages
    assert isinstance(failed, MemberUpgraded) and isinstance(ended, UpgradeEnded)
    assert "mixed-0: the new process cannot be started: " in ended.error and str(program) in ended.error
    [member] = cluster.members
    assert member.process is not None and [member.process.pid] == pids
    assert member.process.returncode == -signal.SIGTERM, "it ran until the cluster was stopped"


def test_a_second_upgrade_is_refused_while_one_is_in_progress(port: int) -> None:
    requesters: list[Requester] = []
    script = f"import sys\nif '--adopt' not in sys.argv: {READY}\n{WAIT}"

    def on_ready(_: LocalCluster) -> None:
        requesters.append(Requester(port, stops=False))
        requesters.append(Requester(port))

    cluster_of(instance("mixed-0", script), on_ready=on_ready, control_port=port).run()
    for requester in requesters:
        requester.join()
    first, second = (requester.messages[-1] for requester in requesters)
    assert first == UpgradeEnded("mixed-0: the cluster is being stopped")
    assert second == UpgradeEnded("an upgrade of this cluster is in progress; wait until it has ended")


def test_a_hangup_during_an_upgrade_reaches_the_new_process_too(port: int) -> None:
    """It may have read the keys before they were changed."""
    lines: list[str] = []
    requesters: list[Requester] = []
    script = (
        "import signal, sys\n"
        "name = 'new' if '--adopt' in sys.argv else 'old'\n"
        "signal.signal(signal.SIGHUP, lambda *_: print(name, 'reads', file=sys.stderr, flush=True))\n"
        f"print(name, 'starts', file=sys.stderr, flush=True); {READY}\n"
        "while True: signal.pause()"
    )

    def on_line(_name: str, line: str) -> None:
        lines.append(line)
        if line == "new starts":
            os.kill(os.getpid(), signal.SIGHUP)
        elif line == "old reads":
            process = cluster.members[0].process
            assert process is not None
            process.kill()
        elif line == "new reads":
            stop(cluster)

    spec = replace(instance("mixed-0", script), reloads_on_sighup=True)
    cluster = cluster_of(
        spec,
        on_line=on_line,
        on_ready=lambda _: requesters.append(Requester(port, stops=False)),
        control_port=port,
    )
    cluster.run()
    requesters[0].join()
    assert lines == ["old starts", "new starts", "old reads", "new reads"]


@contextmanager
def upgrade_of(*members: ClusterMember) -> Iterator[tuple[RollingUpgrade, ControlChannel]]:
    """An upgrade whose new processes never start, and the requester's end of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requester = AdoptionPeer(ControlChannel(ours), os.getpid(), os.pidfd_open(os.getpid()))
    channel = ControlChannel(theirs, FromCluster)
    try:
        yield RollingUpgrade(requester, list(members), lambda _: None, lambda _: None), channel
    finally:
        channel.close()


def member(name: str, *, is_ready: bool) -> ClusterMember:
    return ClusterMember(MemberSpec(name, "mixed", ("instance",), "http://127.0.0.1:1", None, 1), is_ready=is_ready)


def test_an_instance_that_does_not_get_ready_ends_the_upgrade_after_a_while() -> None:
    with upgrade_of(member("mixed-0", is_ready=False)) as (upgrade, channel):
        assert not upgrade.advance(100.0)
        assert not upgrade.advance(99.0 + START_TIMEOUT_S)
        assert upgrade.advance(100.0 + START_TIMEOUT_S)
        assert isinstance(channel.receive(), MemberUpgraded)
        assert channel.receive() == UpgradeEnded(f"mixed-0: the instance has not been ready for {START_TIMEOUT_S:g} s")


def test_a_cluster_that_is_stopped_ends_a_new_process_that_serves_as_it_ends_its_members() -> None:
    """The old process has handed over, and its exit has not been noticed yet. The new one has the streams."""
    old = member("mixed-0", is_ready=True)
    dropped: list[ClusterMember] = []
    with upgrade_of(old) as (upgrade, channel):
        upgrade.drop = dropped.append
        assert not upgrade.advance(100.0)
        [new] = upgrade.starting
        new.is_ready = True
        upgrade.cancel("the cluster is being stopped")
        assert dropped == [old]
        assert upgrade.members == [new]
        assert isinstance(channel.receive(), MemberUpgraded)


def test_a_new_process_that_has_its_place_and_does_not_get_ready_ends_the_upgrade_after_a_while() -> None:
    old = member("mixed-0", is_ready=True)
    old.reload_pending = True
    with upgrade_of(old) as (upgrade, channel):
        assert not upgrade.advance(100.0)
        assert upgrade.replace(old)
        [new] = upgrade.members
        assert new is not old and new.reload_pending, "what the old process was to be told, the new one is told"
        assert not upgrade.advance(99.0 + START_TIMEOUT_S)
        assert upgrade.advance(100.0 + START_TIMEOUT_S)
        assert upgrade.members == [new]
        assert isinstance(channel.receive(), MemberUpgraded)

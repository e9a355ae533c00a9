"""Between instances, over real sockets: who is heard, who is not, and that nothing is kept for a peer that is away."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import pytest
import zmq

from onward.errors import StartupError
from onward.proto.engine import ErrorInfo
from onward.proto.handoff import (
    CancelHandoff,
    HandoffHeartbeat,
    LeaseGrant,
    PeerGone,
    PrefillDone,
    PrefillOffer,
    PrefillRequest,
    PrefillTaken,
    RefuseHandoff,
    ToDecode,
    ToPrefill,
)
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.transport.handoff_sockets import HandoffClientSocket, HandoffServerSocket, _sender
from onward.transport.zmq_sockets import SocketPoller

KEY = "ab" * 32
ERROR = ErrorInfo("pd_prefill_failed", "no", 503)
TO_PREFILL: list[ToPrefill] = [
    PrefillRequest(
        1, KvLayout("f", "float32", 16, 2, 1, 64), "r-0", [1, 0], 2, SamplingParams(seed=5), 1, 2.5, 3.5, "salt", 1
    ),
    LeaseGrant(1, "engine-p", "lease", KvEndpoint("tcp", "tcp:127.0.0.1:9", "worker-d"), 16, [7, 8], 5.0, True),
    RefuseHandoff(1, ERROR),
    PrefillTaken(1),
    CancelHandoff(1, ERROR),
    HandoffHeartbeat(4, [1, 2]),
    PeerGone("engine-d"),
]
TO_DECODE: list[ToDecode] = [
    PrefillOffer(1, "engine-p", 3),
    PrefillDone(1, "engine-p", [0], 16, [TokenLogprobs(-0.5, 1, [(0, -0.5)])], None, [5], [2**63]),
    RefuseHandoff(1, ERROR, "engine-p"),
    CancelHandoff(1, ERROR, "engine-p"),
    HandoffHeartbeat(4, [1], "engine-p"),
    PeerGone("engine-p"),
]
MAX_WAITS = 500
T = TypeVar("T")


class Machine:
    """A listening socket as a supervisor keeps it, and the processes that come and go around it."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"
        self._processes: list[SocketPoller] = []

    def prefill(self, key: str = "") -> tuple[SocketPoller, HandoffServerSocket]:
        wires = self._process()
        return wires, wires.handoff_server(os.dup(self.listening.fileno()), key)

    def decode(self, incarnation: str, key: str = "") -> tuple[SocketPoller, HandoffClientSocket]:
        wires = self._process()
        return wires, wires.handoff_client(self.address, key, incarnation)

    def _process(self) -> SocketPoller:
        self._processes.append(SocketPoller())
        return self._processes[-1]

    def close(self) -> None:
        for wires in self._processes:
            wires.close()
        self.listening.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()


def until(wires: SocketPoller, attempt: Callable[[], T | None]) -> T:
    for _ in range(MAX_WAITS):
        if found := attempt():
            return found
        wires.wait(20)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("key", ["", KEY])
def test_every_message_crosses_in_both_directions_and_names_its_sender(machine: Machine, key: str) -> None:
    prefill, port = machine.prefill(key)
    decode, peer = machine.decode("engine-d", key)
    for message in TO_PREFILL:
        until(decode, lambda message=message: peer.send(message))
    assert [until(prefill, port.receive) for _ in TO_PREFILL] == [("engine-d", message) for message in TO_PREFILL]
    for message in TO_DECODE:
        assert port.send("engine-d", message)
    assert [until(decode, peer.receive) for _ in TO_DECODE] == TO_DECODE


def test_several_decode_instances_are_answered_each_for_itself(machine: Machine) -> None:
    prefill, port = machine.prefill(KEY)
    peers = {name: machine.decode(name, KEY) for name in ("engine-1", "engine-2", "engine-3")}
    for number, (decode, peer) in enumerate(peers.values()):
        until(decode, lambda peer=peer, number=number: peer.send(PrefillTaken(number)))
    heard = dict(until(prefill, port.receive) for _ in peers)
    assert heard == {"engine-1": PrefillTaken(0), "engine-2": PrefillTaken(1), "engine-3": PrefillTaken(2)}
    for name in peers:
        assert port.send(name, PeerGone(name))
    for name, (decode, peer) in peers.items():
        assert until(decode, peer.receive) == PeerGone(name)


@pytest.mark.parametrize("wrong", ["", "ab" * 31 + "ac"])
def test_nobody_without_the_clusters_key_gets_a_message_across(machine: Machine, wrong: str) -> None:
    prefill, port = machine.prefill(KEY)
    _, stranger = machine.decode("stranger", wrong)
    friends = [machine.decode(f"friend-{number}", KEY) for number in range(3)]
    for decode, friend in friends:
        until(decode, lambda friend=friend: friend.send(PrefillTaken(1)))
        assert not stranger.send(PrefillTaken(2))
        assert until(prefill, port.receive)[0].startswith("friend")
    assert not port.send("stranger", PeerGone("x"))


def test_a_listener_without_the_key_hears_nothing_from_those_that_hold_it(machine: Machine) -> None:
    prefill, port = machine.prefill()
    _, keyed = machine.decode("keyed", KEY)
    decode, plain = machine.decode("plain")
    until(decode, lambda: plain.send(PrefillTaken(1)))
    assert until(prefill, port.receive) == ("plain", PrefillTaken(1))
    assert not keyed.send(PrefillTaken(2))


def test_a_message_for_an_absent_peer_is_refused_and_never_reaches_its_successor(machine: Machine) -> None:
    decode, peer = machine.decode("engine-d")
    assert not peer.send(PrefillTaken(1))
    first, port = machine.prefill()
    until(decode, lambda: peer.send(PrefillTaken(2)))
    assert until(first, port.receive) == ("engine-d", PrefillTaken(2))
    first.close()
    until(decode, lambda: not peer.send(PrefillTaken(3)))
    assert not peer.send(PrefillTaken(4))
    second, successor = machine.prefill()
    until(decode, lambda: peer.send(PrefillTaken(5)))
    assert until(second, successor.receive) == ("engine-d", PrefillTaken(5))


def test_a_restarted_engine_takes_over_the_same_listening_socket(machine: Machine) -> None:
    decode, peer = machine.decode("engine-d", KEY)
    for number in range(3):
        prefill, port = machine.prefill(KEY)
        until(decode, lambda number=number: peer.send(PrefillTaken(number)))
        assert until(prefill, port.receive) == ("engine-d", PrefillTaken(number))
        assert port.send("engine-d", PeerGone(str(number)))
        assert until(decode, peer.receive) == PeerGone(str(number))
        prefill.close()
        until(decode, lambda: not peer.send(HandoffHeartbeat(0, [])))


def test_a_decode_engine_that_is_gone_is_refused_and_a_new_one_is_another_peer(machine: Machine) -> None:
    prefill, port = machine.prefill()
    assert not port.send("engine-1", PeerGone("nobody"))
    first, peer = machine.decode("engine-1")
    until(first, lambda: peer.send(PrefillTaken(1)))
    until(prefill, port.receive)
    first.close()
    until(prefill, lambda: not port.send("engine-1", PeerGone("x")))
    second, successor = machine.decode("engine-2")
    until(second, lambda: successor.send(PrefillTaken(2)))
    assert until(prefill, port.receive) == ("engine-2", PrefillTaken(2))
    assert not port.send("engine-1", PeerGone("late"))


def test_a_reconnecting_incarnation_replaces_its_old_connection(machine: Machine) -> None:
    prefill, port = machine.prefill()
    old, half_open = machine.decode("engine-d")
    until(old, lambda: half_open.send(PrefillTaken(1)))
    until(prefill, port.receive)
    new, peer = machine.decode("engine-d")
    until(new, lambda: peer.send(PrefillTaken(2)))
    assert until(prefill, port.receive) == ("engine-d", PrefillTaken(2))
    assert port.send("engine-d", PeerGone("for the new one"))
    assert until(new, peer.receive) == PeerGone("for the new one")


def test_a_peer_that_does_not_read_never_blocks_the_sender(machine: Machine) -> None:
    prefill, port = machine.prefill()
    decode, peer = machine.decode("engine-d")
    until(decode, lambda: peer.send(PrefillTaken(1)))
    until(prefill, port.receive)
    long = HandoffHeartbeat(1, list(range(2_000)))
    sent = 0
    while peer.send(long):
        sent += 1
        assert sent < 10_000, "the queue has a bound"
    assert sent > 0


@pytest.mark.parametrize("frames", [[b"not a message"], [b"two", b"parts"], []])
def test_damaged_messages_are_the_receivers_to_drop(machine: Machine, frames: list[bytes]) -> None:
    prefill, port = machine.prefill()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    vandal = context.socket(zmq.DEALER)
    vandal.setsockopt(zmq.IDENTITY, b"\xff\xfe")
    vandal.connect(machine.address)
    vandal.send_multipart(frames or [msgspec.msgpack.encode(PrefillTaken(1))])
    with pytest.raises(msgspec.DecodeError):
        until(prefill, port.receive)
    decode, peer = machine.decode("engine-d")
    until(decode, lambda: peer.send(PrefillTaken(2)))
    assert until(prefill, port.receive) == ("engine-d", PrefillTaken(2))
    context.destroy(linger=0)


def test_nobody_is_heard_without_a_name(machine: Machine) -> None:
    """zmq invents names: for those who have none, and for what is left of a connection that its peer has replaced."""
    prefill, port = machine.prefill()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for _ in range(5):
        with context.socket(zmq.DEALER) as nobody, pytest.raises(msgspec.DecodeError):
            nobody.connect(machine.address)
            nobody.send(msgspec.msgpack.encode(PrefillTaken(1)))
            until(prefill, port.receive)
    context.destroy(linger=0)
    with pytest.raises(msgspec.DecodeError):
        _sender(b"\0abcd")


def test_without_a_key_only_this_machine_is_spoken_to_or_listened_to() -> None:
    wires = SocketPoller()
    with pytest.raises(StartupError, match=r"tcp://192\.0\.2\.1:7000.*--cluster-key-file"):
        wires.handoff_client("tcp://192.0.2.1:7000", "", "engine-d")
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        pytest.raises(StartupError, match=r"tcp://0\.0\.0\.0:\d+.*--cluster-key-file"),
    ):
        wires.handoff_server(everywhere.fileno(), "")
    wires.handoff_client("tcp://192.0.2.1:7000", KEY, "engine-d")
    wires.handoff_client("tcp://localhost:7000", "", "engine-d")
    wires.handoff_client("tcp://[::1]:7000", "", "engine-d")
    wires.handoff_client("ipc://@somewhere", "", "engine-d")
    wires.close()

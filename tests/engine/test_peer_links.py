"""The engine's sockets to prefill instances, over real ones."""

import os
import socket
import time

import pytest

from onward.config import EngineConfig
from onward.engine.handoff.handoff_manager import HandoffOutbox
from onward.engine.handoff.peer_links import PeerLinks
from onward.proto.control import StartEngine
from onward.proto.handoff import Ping, ToPrefill
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller

WAIT_S = 20.0


@pytest.mark.parametrize("cluster_key", ["", "ab" * 32])
def test_a_peer_with_an_address_that_cannot_be_used_is_one_that_cannot_be_reached(cluster_key: str) -> None:
    """A request names its peers: what is wrong with them is no reason for the engine to die."""
    wires = SocketPoller()
    start = StartEngine("engine-1", EngineConfig(), make_private_address("engine-1")[0], cluster_key=cluster_key)
    links = PeerLinks(wires, start)
    bad = ["nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:70000"]
    if not cluster_key:
        bad.append("tcp://192.0.2.1:7000")
    to_prefill: list[tuple[str, ToPrefill]] = [(address, Ping()) for address in bad]
    assert links.send(HandoffOutbox(frozenset(bad), to_prefill)) == [(address, False) for address in bad]
    assert list(links.receive_from_prefill(9)) == []
    assert links.send(HandoffOutbox(frozenset({"tcp://127.0.0.1:9"}))) == [], "the others can be forgotten"
    wires.close()


def test_an_engine_that_awaits_its_turn_leaves_connections_to_the_old_server() -> None:
    wires, decode_wires = SocketPoller(), SocketPoller()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        start = StartEngine(
            "engine-1",
            EngineConfig(role="prefill"),
            make_private_address("engine-1")[0],
            os.dup(listening.fileno()),
            awaits_turn=True,
        )
        links = PeerLinks(wires, start)
        assert os.get_blocking(listening.fileno()), "an engine that accepts connections makes the socket non-blocking"
        links.listen()
        assert not os.get_blocking(listening.fileno())
        decode = decode_wires.handoff_client(f"tcp://127.0.0.1:{port}", "", "decode-1")
        give_up_at_s = time.monotonic() + WAIT_S
        while not decode.send(Ping()):
            assert time.monotonic() < give_up_at_s
            decode_wires.wait(10)
        while not (received := list(links.receive_from_decode(9))):
            assert time.monotonic() < give_up_at_s
            wires.wait(10)
        assert received == [("decode-1", Ping())]
        decode_wires.close()
        wires.close()


def test_a_last_word_to_a_peer_that_was_forgotten_in_the_same_turn_is_lost() -> None:
    """As when a request is withdrawn that was there for longer than peers are kept that no request names."""
    wires = SocketPoller()
    links = PeerLinks(wires, StartEngine("engine-1", EngineConfig(), make_private_address("engine-1")[0]))
    peer = "tcp://127.0.0.1:9"
    links.send(HandoffOutbox(frozenset({peer})))
    assert links.send(HandoffOutbox(frozenset(), [(peer, Ping())])) == [(peer, False)]
    wires.close()

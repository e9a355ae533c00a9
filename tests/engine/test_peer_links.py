"""The engine's sockets to prefill instances, over real ones."""

import pytest

from onward.config import EngineConfig
from onward.engine.handoff.handoff_manager import HandoffOutbox
from onward.engine.handoff.peer_links import PeerLinks
from onward.proto.control import StartEngine
from onward.proto.handoff import Ping, ToPrefill
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller


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


def test_a_last_word_to_a_peer_that_was_forgotten_in_the_same_turn_is_lost() -> None:
    """As when a request is withdrawn that was there for longer than peers that nobody names are kept."""
    wires = SocketPoller()
    links = PeerLinks(wires, StartEngine("engine-1", EngineConfig(), make_private_address("engine-1")[0]))
    peer = "tcp://127.0.0.1:9"
    links.send(HandoffOutbox(frozenset({peer})))
    assert links.send(HandoffOutbox(frozenset(), [(peer, Ping())])) == [(peer, False)]
    wires.close()

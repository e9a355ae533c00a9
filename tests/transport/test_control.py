import pytest

from onward.proto.control import AskSnapshot, Progress, Ready
from onward.transport.control import ChannelClosed, ControlChannel, control_pair


def test_messages_arrive_whole_and_in_order() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    for number in range(3):
        ours.send(AskSnapshot(number))
    assert [theirs.receive() for _ in range(3)] == [AskSnapshot(0), AskSnapshot(1), AskSnapshot(2)]
    assert theirs.receive() is None
    theirs.send(Ready())
    assert ours.receive() == Ready()
    ours.close()
    theirs.close()


def test_the_end_of_one_side_is_felt_on_the_other() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    theirs.send(Progress("last words"))
    theirs.close()
    assert ours.receive() == Progress("last words")
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(AskSnapshot(1))
    ours.close()


def test_a_peer_that_does_not_read_never_blocks_the_sender() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    sent = 0
    while theirs.send(Progress("x" * 10_000)):
        sent += 1
        assert sent < 10_000, "the buffer has a bound"
    assert sent > 0
    assert ours.receive() == Progress("x" * 10_000)
    assert theirs.send(Progress("room again"))
    ours.close()
    theirs.close()

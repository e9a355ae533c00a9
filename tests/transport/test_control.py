import os
import socket

import pytest

from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.control import ChildReady, QueryMetrics, StartupProgress, UpdateApiKeys
from onward.transport.control_channel import ChannelClosed, ControlChannel, control_pair
from onward.web.auth.api_key_table import MAX_KEYS, MAX_LIMIT, MAX_NAME_LENGTH

KERNEL_DEFAULT_BYTES = 212_992
"""What Linux grants a socket's buffer at most, unless `wmem_max` was raised."""


def test_messages_arrive_whole_and_in_order() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    for number in range(3):
        ours.send(QueryMetrics(number))
    assert [theirs.receive() for _ in range(3)] == [QueryMetrics(0), QueryMetrics(1), QueryMetrics(2)]
    assert theirs.receive() is None
    theirs.send(ChildReady())
    assert ours.receive() == ChildReady()
    ours.close()
    theirs.close()


def test_the_end_of_one_side_is_felt_on_the_other() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    theirs.send(StartupProgress("last words"))
    theirs.close()
    assert ours.receive() == StartupProgress("last words")
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(QueryMetrics(1))
    ours.close()


def test_a_peer_that_does_not_read_never_blocks_the_sender() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    sent = 0
    while theirs.send(StartupProgress("x" * 10_000)):
        sent += 1
        assert sent < 10_000, "the buffer has a bound"
    assert sent > 0
    assert ours.receive() == StartupProgress("x" * 10_000)
    assert theirs.send(StartupProgress("room again"))
    ours.close()
    theirs.close()


def test_the_largest_table_of_keys_passes_whatever_buffers_the_kernel_grants() -> None:
    entries = [
        ApiKeyEntry(
            name=f"{number:x>{MAX_NAME_LENGTH}}",
            digest=f"{number:064x}",
            max_in_flight=MAX_LIMIT,
            tokens_per_minute=MAX_LIMIT,
            max_connections=MAX_LIMIT,
        )
        for number in range(MAX_KEYS)
    ]
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_DEFAULT_BYTES)
    assert ours.send(UpdateApiKeys(entries))
    assert ours.send(QueryMetrics(1))
    assert theirs.receive() == UpdateApiKeys(entries)
    assert theirs.receive() == QueryMetrics(1)
    ours.close()
    theirs.close()


def test_file_descriptors_come_along_with_a_large_message_too() -> None:
    ours, raw = control_pair()
    theirs = ControlChannel(raw)
    read_end, write_end = os.pipe()
    assert ours.send(UpdateApiKeys([ApiKeyEntry(name="x" * 1_000_000, digest="")]), [write_end])
    os.close(write_end)
    assert theirs.receive() == UpdateApiKeys([ApiKeyEntry(name="x" * 1_000_000, digest="")])
    [given] = theirs.take_fds()
    os.write(given, b"!")
    assert os.read(read_end, 9) == b"!"
    for fd in (given, read_end):
        os.close(fd)
    ours.close()
    theirs.close()

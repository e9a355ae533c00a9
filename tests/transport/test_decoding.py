import msgspec
import pytest

from onward.proto.handoff import Pong, ToDecode
from onward.transport.message_decoding import decode_message


@pytest.mark.parametrize(
    "data",
    [
        b"\x92\xa4pong\xa1\xff",  # a text that is no UTF-8
        b"\x93\xa4pong\xa1a" + b"\x91" * 100_000,  # nesting without end, in a field that a later version may have
        b"\x92\xa4pong",
        b"\x92\xa4what\xa1a",
        b"",
    ],
)
def test_whatever_is_wrong_with_a_message_it_fails_in_one_way(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.Decoder(ToDecode), data)


def test_a_message_is_decoded() -> None:
    data = msgspec.msgpack.encode(Pong("a"))
    assert decode_message(msgspec.msgpack.Decoder(ToDecode), memoryview(data)) == Pong("a")

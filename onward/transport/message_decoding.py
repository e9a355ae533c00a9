"""Decodes messages from outside the process, with a single kind of error.

msgspec itself raises three: for a message of another form, for text that is not UTF-8, and for too deep nesting. A
malicious sender could crash a receiver that handles only the first one.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_message(decoder: "msgspec.msgpack.Decoder[T]", data: "bytes | memoryview") -> T:
    """Returns the decoded message. Raises `msgspec.DecodeError`, and no other error."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as fault:
        raise msgspec.DecodeError(f"a text is not UTF-8: {fault.reason}") from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None

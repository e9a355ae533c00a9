"""Messages from outside the process, decoded so that there is one way to fail.

msgspec itself has three: what is no message of the kind, text that is no UTF-8, and nesting without end. A receiver that
drops the first and has not heard of the others is brought down by whoever sends them.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_message(decoder: "msgspec.msgpack.Decoder[T]", data: "bytes | memoryview") -> T:
    """Raises `msgspec.DecodeError`, and nothing else."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as fault:
        raise msgspec.DecodeError(f"a text is not UTF-8: {fault.reason}") from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None

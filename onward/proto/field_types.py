"""The ranges of numbers in messages. msgspec checks them where a message is decoded, and refuses the message.

NaN and infinity are in none of them: one NaN among the waiting times leaves the queue without an order. Ranges are those
that the receiver can work with, and wider than what a client may ask for, which `api.requests.validation` decides.
"""

from typing import Annotated

from msgspec import Meta

MAX_SERIAL = (1 << 63) - 1

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""A number of tokens, blocks, slots or requests; an index of one of them; or a token id."""
Serial = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
"""An epoch, a step, the number of a message; also a size in bytes."""
SerialOrNone = Annotated[int, Meta(ge=-1, le=MAX_SERIAL)]
"""A serial number; -1: before the first one."""
LeaseId = Annotated[str, Meta(max_length=512)]
"""Names a lease of KV blocks. Bounded, because replies and later messages repeat it, and those have a bound too."""
Word64 = int
"""Any 64 bits, with or without a sign: a seed, a checksum, or a place in memory, which its owner holds against its own
memory. msgpack has no longer integers."""
FileDescriptor = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""An open file descriptor; -1: none."""
Priority = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]
HttpError = Annotated[int, Meta(ge=400, le=599)]

WallSecond = Annotated[int, Meta(ge=0, lt=1 << 37)]
"""Seconds of Unix time."""
MAX_DURATION_S = 2.0**53
Duration = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""In seconds."""
TimeLeft = Annotated[float, Meta(ge=-MAX_DURATION_S, le=MAX_DURATION_S)]
"""In seconds; below 0 where a deadline has passed."""
RetryDelay = Annotated[float, Meta(ge=0.0, le=3600.0)]
"""In seconds, between two tries."""

UnitInterval = Annotated[float, Meta(ge=0.0, le=1.0)]
Factor = Annotated[float, Meta(ge=0.0, le=1e6)]
ModelParameter = Annotated[float, Meta(ge=0.0, le=1e30)]
"""A parameter of a model's architecture, from its config; within the range of a float32."""
Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]
"""Added to or subtracted from a logit."""

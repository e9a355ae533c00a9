"""What two workers say to each other over their link.

writer (prefill)                     receiver (decode)
Greeting  ------------------------>
          <------------------------  Challenge, or Refused
Claim     ------------------------>
          <------------------------  Invited, or Refused
Join      ------------------------>
          <------------------------  Joined, or Stop
Incoming and bytes, or Wrote  ---->                              as often as it takes
Written   ------------------------>
          <------------------------  Accepted, or Stop
Left      ------------------------>                              at any time after Join; also the answer to Stop
"""

import msgspec

from onward.proto.field_types import Count, LeaseId, Word64
from onward.proto.kv_transfer import KvLayout


class SenderHello(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    version: Count
    nonce: bytes
    incarnation: str
    """Of the worker that the writer means."""
    layout: KvLayout


class ReceiverChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes
    proof: bytes
    """That the receiver knows the key."""


class SenderProof(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    proof: bytes
    """That the writer does."""


class ReceiverWelcome(msgspec.Struct, frozen=True, array_like=True, tag="invited"):
    num_blocks: Count
    data: bytes
    """The backend's own. File descriptors travel with it."""


class HandshakeRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The connection ends with this."""

    message: str


class OpenPush(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """I am the one who writes under this lease."""

    lease_id: LeaseId
    block_ids: list[Count]


class PushOpened(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """Write now, and not before: until then nobody could have told you that the lease is over."""

    lease_id: LeaseId


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True, tag="incoming"):
    """Bytes for these places (offset, length) of the receiver's memory follow this message."""

    lease_id: LeaseId
    byte_ranges: list[tuple[Word64, Word64]]


class PagesWritten(msgspec.Struct, frozen=True, array_like=True, tag="wrote"):
    """These places of the receiver's memory have been written, by other means than this link."""

    lease_id: LeaseId
    byte_ranges: list[tuple[Word64, Word64]]


class AllPagesWritten(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """That was all."""

    lease_id: LeaseId


class AllPagesAccepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The receiver has counted every page of the lease."""

    lease_id: LeaseId


class StopWriting(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Write nothing more under this lease, and say so."""

    lease_id: LeaseId
    message: str


class WritingStopped(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The writer writes nothing more under this lease; nothing that it has begun is under way."""

    lease_id: LeaseId


ToReceiver = SenderHello | SenderProof | OpenPush | PayloadHeader | PagesWritten | AllPagesWritten | WritingStopped
ToWriter = ReceiverChallenge | ReceiverWelcome | HandshakeRefused | PushOpened | AllPagesAccepted | StopWriting

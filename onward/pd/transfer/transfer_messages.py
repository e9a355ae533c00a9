"""Messages between two workers over their link.

writer (prefill)                              receiver (decode)
SenderHello      ------------------------>
                 <------------------------    ReceiverChallenge, or HandshakeRefused
SenderProof      ------------------------>
                 <------------------------    ReceiverWelcome, or HandshakeRefused
OpenPush         ------------------------>
                 <------------------------    PushOpened, or StopWriting
PayloadHeader and bytes, or PagesWritten ->   repeated until all pages are written
AllPagesWritten  ------------------------>
                 <------------------------    AllPagesAccepted, or StopWriting
WritingStopped   ------------------------>    at any time after OpenPush; also the answer to StopWriting
"""

import msgspec

from onward.proto.field_types import Count, LeaseId, Word64
from onward.proto.kv_transfer import KvLayout


class SenderHello(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    version: Count
    nonce: bytes
    incarnation: str
    """Incarnation of the worker that the writer wants to reach."""
    layout: KvLayout


class ReceiverChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes
    proof: bytes
    """Proof that the receiver holds the key."""


class SenderProof(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    proof: bytes
    """Proof that the writer holds the key."""


class ReceiverWelcome(msgspec.Struct, frozen=True, array_like=True, tag="invited"):
    num_blocks: Count
    data: bytes
    """Data of the backend. File descriptors are attached to the message."""


class HandshakeRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Refuses the connection, which ends with this."""

    message: str


class OpenPush(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The sender of this message will write under the lease."""

    lease_id: LeaseId
    block_ids: list[Count]


class PushOpened(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """The writer may write from now on, and not before: until then it could not be informed that the lease is over."""

    lease_id: LeaseId


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True, tag="incoming"):
    """Bytes for these ranges (offset, length) of the receiver's memory follow this message."""

    lease_id: LeaseId
    byte_ranges: list[tuple[Word64, Word64]]


class PagesWritten(msgspec.Struct, frozen=True, array_like=True, tag="wrote"):
    """These ranges of the receiver's memory have been written, by other means than this link."""

    lease_id: LeaseId
    byte_ranges: list[tuple[Word64, Word64]]


class AllPagesWritten(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """The writer has written all pages of the lease."""

    lease_id: LeaseId


class AllPagesAccepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The receiver has counted every page of the lease."""

    lease_id: LeaseId


class StopWriting(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The writer must write nothing more under this lease, and answer with `WritingStopped`."""

    lease_id: LeaseId
    message: str


class WritingStopped(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The writer writes nothing more under this lease; none of its batches is in flight."""

    lease_id: LeaseId


ToReceiver = SenderHello | SenderProof | OpenPush | PayloadHeader | PagesWritten | AllPagesWritten | WritingStopped
ToWriter = ReceiverChallenge | ReceiverWelcome | HandshakeRefused | PushOpened | AllPagesAccepted | StopWriting

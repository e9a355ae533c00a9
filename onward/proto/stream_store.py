"""Messages between the api processes of an instance and its stream store, which owns the records that clients can
ask for by an id.

A running stream belongs to the api process that serves it; the stream store has no record of it and queries the api
processes.

    api -> stream store    PutEntry, DropSuperseded                                  no reply
                           StoreHeartbeat    each second, and after many entries     StoreHeartbeatReply
                           FindEntry         which process has it, or its record     FindReply
                           ClaimAttempt      before a later attempt at it starts     ClaimReply
                           DropByName        an abort                                DropReply
                           Delete            a response, for good                    DropReply
    stream store -> api    QueryLiveStream   asks whether it runs there              LiveStreamReply
                           ReleaseAttempt    another process continues it            ReleaseReply

Any message may be lost. The query then ends at the deadline of the stream store or of the process that asked.
"""

from typing import Literal

import msgspec

from onward.proto.field_types import Duration, Serial

EntryKind = Literal["detached", "ended", "response"]
"""`detached`: cut off in the middle; `ended`: written to its end, which the client may not have read; `response`: to be
asked for by its id, for longer. Each kind has bounds of its own, so that none pushes out one of another."""
EntryStatus = Literal["open", "complete", "cancelled", "deleted"]
"""`open`: a later attempt may replace the record. A record that is `complete` or `cancelled` is never replaced, so a
response has one end. No attempt at a request starts once it is `cancelled`. `deleted`: it is unknown, and stays so although
the process that ran it has yet to put how it has ended."""


class StoreEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A record that can be found by its id. The stream store does not interpret `data`."""

    request_id: str
    aliases: tuple[str, ...]
    """Further names by which the record can be dropped."""
    caller: str
    """The caller that owns the record; empty without keys."""
    kind: EntryKind
    attempt_epoch: Serial
    """If two records have one id, the one with the higher epoch is valid."""
    data: bytes
    ttl_s: Duration
    status: EntryStatus = "open"
    is_stored: bool = False
    """A response that its client may ask for: an abort ends it and does not drop it."""


class StoreHeartbeat(msgspec.Struct, frozen=True, tag="hello"):
    num_bytes: Serial
    """Bytes stored so far."""


class PutEntry(msgspec.Struct, frozen=True, tag="put"):
    entry: StoreEntry


class DropSuperseded(msgspec.Struct, frozen=True, tag="forget"):
    """A later attempt of this caller runs: what those up to this epoch have left is of no use any more."""

    request_id: str
    attempt_epoch: Serial
    caller: str


class FindEntry(msgspec.Struct, frozen=True, tag="find"):
    query_id: Serial
    request_id: str
    attempt_epoch: Serial = 0
    """A record of this one or a later one is good enough; 0: whichever is the latest."""
    caller: str | None = None
    """None: records of all callers match."""


class ClaimAttempt(msgspec.Struct, frozen=True, tag="claim"):
    query_id: Serial
    request_id: str
    attempt_epoch: Serial
    """Epoch of the attempt that is about to start. Earlier attempts that run elsewhere end."""
    caller: str
    """A claim does not end another caller's attempt."""
    to_finalize: bool = False
    """The claiming process will not run the request, but store its end. No other process starts it meanwhile."""


class DropByName(msgspec.Struct, frozen=True, tag="drop_named"):
    """Responses that are stored stay."""

    query_id: Serial
    names: list[str]
    drop_all: bool = False
    caller: str | None = None


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    query_id: Serial
    record_id: str
    caller: str


class LiveStreamReply(msgspec.Struct, frozen=True, tag="shown"):
    query_id: Serial
    entry: StoreEntry | None


class ReleaseReply(msgspec.Struct, frozen=True, tag="released"):
    query_id: Serial
    entry: StoreEntry | None = None
    """Output of an earlier attempt, which the claim has ended."""
    blocking_epoch: Serial | None = None
    """An attempt that does not end for this one runs here: it is not earlier, or another caller's."""


ToStreamStore = (
    StoreHeartbeat
    | PutEntry
    | DropSuperseded
    | FindEntry
    | ClaimAttempt
    | DropByName
    | Delete
    | LiveStreamReply
    | ReleaseReply
)


class StoreHeartbeatReply(msgspec.Struct, frozen=True, tag="heard"):
    num_bytes: Serial


class FindReply(msgspec.Struct, frozen=True, tag="found"):
    query_id: Serial
    entry: StoreEntry | None


class ClaimReply(msgspec.Struct, frozen=True, tag="claimed"):
    query_id: Serial
    blocking_epoch: Serial | None = None
    """Refused: this attempt is there already. None: go on."""


class DropReply(msgspec.Struct, frozen=True, tag="dropped"):
    query_id: Serial
    names: list[str]
    """The known names; the ids, if everything was dropped."""
    open: dict[str, list[str]] = {}
    """Stored responses that have not ended, each with the names that matched. The api process that asks ends them."""


class QueryLiveStream(msgspec.Struct, frozen=True, tag="show"):
    query_id: Serial
    request_id: str


class ReleaseAttempt(msgspec.Struct, frozen=True, tag="release"):
    query_id: Serial
    request_id: str
    attempt_epoch: Serial
    """Epoch of the attempt that is about to start elsewhere."""
    caller: str


FromStreamStore = StoreHeartbeatReply | FindReply | ClaimReply | DropReply | QueryLiveStream | ReleaseAttempt

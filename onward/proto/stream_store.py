"""Between the api processes of an instance and its stream store, the one owner of what clients can ask for by an id.

Streams that run belong to the api process that serves them; the stream store has no record of them and queries the api
processes when it must.

    api -> stream store    PutEntry, DropSuperseded                                  no reply
                           StoreHeartbeat    each second, and after many entries     StoreHeartbeatReply
                           FindEntry         which process has it, or its record     FindReply
                           ClaimAttempt      before a later attempt at it starts     ClaimReply
                           DropByName        an abort                                DropReply
                           Delete            a response, for good                    DropReply
    stream store -> api    QueryLiveStream   do you run it?                          LiveStreamReply
                           ReleaseAttempt    another process continues it            ReleaseReply

Any of them may be lost. Then a query is answered late, by the deadline of the stream store or of the process that asked.
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
    """Something that can be asked for by its id. What `data` is, only those who put and ask know."""

    request_id: str
    aliases: tuple[str, ...]
    """What it can be dropped by, beside its id."""
    caller: str
    """Whose it is; empty: nobody's in particular."""
    kind: EntryKind
    attempt_epoch: Serial
    """Of two with one id the higher one counts."""
    data: bytes
    ttl_s: Duration
    status: EntryStatus = "open"
    is_stored: bool = False
    """A response that its client may ask for: an abort ends it and does not drop it."""


class StoreHeartbeat(msgspec.Struct, frozen=True, tag="hello"):
    num_bytes: Serial
    """That were put so far."""


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
    """None: everybody's."""


class ClaimAttempt(msgspec.Struct, frozen=True, tag="claim"):
    query_id: Serial
    request_id: str
    attempt_epoch: Serial
    """Of the attempt that is about to start. Earlier ones that run elsewhere end."""
    caller: str
    """Nobody ends another's."""
    to_finalize: bool = False
    """Whoever claims it will not run it, but put how it has ended: nobody else starts it meanwhile."""


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
    """What there was of an earlier attempt, which has ended by this."""
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
    """Those that were known; the ids, where everything was dropped."""
    open: dict[str, list[str]] = {}
    """Stored responses that have not ended, each with the names that matched. The api process that asks ends them."""


class QueryLiveStream(msgspec.Struct, frozen=True, tag="show"):
    query_id: Serial
    request_id: str


class ReleaseAttempt(msgspec.Struct, frozen=True, tag="release"):
    query_id: Serial
    request_id: str
    attempt_epoch: Serial
    """Of the attempt that is about to start elsewhere."""
    caller: str


FromStreamStore = StoreHeartbeatReply | FindReply | ClaimReply | DropReply | QueryLiveStream | ReleaseAttempt

"""Streams whose client has gone, or may not have received the end. They are stored for a limited time, so that the
client can resume them.

Callers share the bounds fairly, see `fair_record_store`. Takes the time; does no I/O.
"""

from collections import OrderedDict
from collections.abc import Set

from onward.fair_record_store import FairRecordStore, RecordLimits
from onward.router.client_stream import ClientStream
from onward.web.openai_api.response_options import is_stored

BOUNDS = RecordLimits(max_records=4096, max_bytes=256 << 20)
TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 16384


class ResumableStreams:
    """Streams without a running attempt whose client may come back."""

    def __init__(self, ttl_s: float, bounds: RecordLimits = BOUNDS) -> None:
        self._ttl_s = ttl_s
        self._kept: FairRecordStore[ClientStream] = FairRecordStore(bounds)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: ClientStream, now_s: float) -> None:
        assert not stream.is_attempt_running, "a stream is kept after its attempt has ended"
        caller, until_s = stream.request.caller, now_s + self._ttl_s
        self._kept.put(stream.request_id, caller, stream, stream.size_bytes(), until_s, now_s)

    def find(self, request_id: str, now_s: float) -> ClientStream | None:
        return self._kept.get(request_id, now_s)

    def drop(self, request_id: str) -> bool:
        return self._kept.drop(request_id)

    def drop_matching(self, names: Set[str] | None, caller: str | None) -> list[ClientStream]:
        """Removes and returns the streams with one of these names, or all; of one caller, or of all callers."""
        dropped = [kept_stream for kept_stream in self._kept.values() if matches(kept_stream, names, caller)]
        for stream in dropped:
            self.drop(stream.request_id)
        return dropped

    def expire(self, now_s: float) -> None:
        self._kept.expire(now_s)


def matches(stream: ClientStream, names: Set[str] | None, caller: str | None) -> bool:
    """Returns whether an abort ends the stream: it has one of `names` as its id or label (None: any), and belongs to
    `caller` (None: any caller). A stored response that is complete is not ended."""
    client_request = stream.request
    names_of_stream = {client_request.request_id, client_request.client_request_id} - {""}
    if caller not in (None, client_request.caller) or (names is not None and names.isdisjoint(names_of_stream)):
        return False
    return not (stream.all_finished and is_stored(client_request.path, client_request.body))


class Tombstones:
    """Requests that were aborted: nothing may bring them back while an attempt at them may still be on its way."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, now_s: float) -> None:
        self._until_s[request_id] = now_s + TOMBSTONE_S
        self._until_s.move_to_end(request_id)
        while len(self._until_s) > MAX_TOMBSTONES:
            self._until_s.popitem(last=False)

    def has(self, request_id: str, now_s: float) -> bool:
        return self._until_s.get(request_id, now_s) > now_s

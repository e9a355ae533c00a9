"""A response as a stream of events, for a client or for a router in front of one.

What a token brings about may be several events, of which the last has the `id:` line; the router is told to pass them on
together. An attempt that goes on with an answer replays the tokens that were told before and counts their events.
"""

from onward.api.cursors import Cursors
from onward.api.forms import FactsOnce, Form, RoutedWholeForm
from onward.api.jobs import Job
from onward.api.pieces import Piece
from onward.api.responses.teller import Group, NumberedEvent, Teller
from onward.api.responses.writer import ResponseWriter
from onward.api.starts import given_of
from onward.proto.cursor import ChoiceCursor
from onward.proto.request import ErrorInfo
from onward.web import sse


def form_of(job: Job) -> Form:
    if not job.prepared.is_routed:
        return ResponseForm(job)
    return RoutedWholeForm(job) if job.prepared.is_whole else RoutedResponseForm(job)


def event_bytes(event: NumberedEvent, cursor: str | None = None) -> bytes:
    return sse.named_event(event.name, event.data, cursor)


class ResponseForm:
    done = b""
    """The last event says that it is the last."""
    has_numbers = True

    def __init__(self, job: Job) -> None:
        assert isinstance(job.writer, ResponseWriter)
        self._job = job
        self._teller: Teller = job.writer.teller(job.head, job.answer.usage)
        given = given_of(job.prepared)[0]
        self._num_told = len(given.token_ids)
        """Tokens whose events the reader has had, in an earlier attempt."""
        self._end_is_told = given.finish_reason is not None
        self._num_heard = 0
        self._cursors = Cursors(job.prepared.attempt, [self._num_told], [ChoiceCursor(self._num_told)])

    def opening(self) -> list[bytes]:
        opening = [self.held(event) for event in self._teller.opening()]
        replayed = self.news(self._job.replayed)
        return replayed if self._job.prepared.is_continued else opening + replayed

    def news(self, pieces: list[Piece]) -> list[bytes]:
        told: list[bytes] = []
        for piece in pieces:
            for group in self._teller.take(piece):
                told += self._told(group, is_known=piece.skipped)
        return told

    def end(self) -> list[bytes]:
        """What has waited for scores that did not come."""
        return [one for group in self._teller.without_scores() for one in self._told(group, is_known=False)]

    def failed(self, info: ErrorInfo) -> list[bytes]:
        # Tokens that wait for their scores come before the failure: it has the number and the output that follow from them.
        return [*self.end(), event_bytes(self._teller.failed(info))]

    def _told(self, group: Group, *, is_known: bool) -> list[bytes]:
        num_known = max(0, self._num_told - self._num_heard)
        self._num_heard += len(group.token_ids)
        new, reason = group.token_ids[num_known:], group.finish_reason
        if not new and (reason is None or self._end_is_told):
            return []
        cursor = self._cursors.after(Piece(0, new, "", reason))
        assert cursor is not None, "it has tokens or an end that nobody has been told"
        if is_known or not group.events:
            return self.unread(cursor)
        *held, last = group.events
        return [*map(self.held, held), event_bytes(last, cursor)]

    def held(self, event: NumberedEvent) -> bytes:
        """One that goes with the next."""
        return event_bytes(event)

    def unread(self, cursor: str) -> list[bytes]:
        """Tokens of which a reader learns nothing yet."""
        return []


class RoutedResponseForm(ResponseForm):
    """The same for a router, which is told more."""

    done = sse.DONE
    has_numbers = False

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._facts = FactsOnce(job)

    def news(self, pieces: list[Piece]) -> list[bytes]:
        return self._facts.before(pieces) + super().news(pieces)

    def failed(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info)]

    def held(self, event: NumberedEvent) -> bytes:
        return sse.HELD + event_bytes(event)

    def unread(self, cursor: str) -> list[bytes]:
        return [sse.bare_event(cursor)]

"""The shelf's side of the protocol of `proto.shelf`: keeps records, and settles who goes on with a stream.

An attempt at a request runs in one api process. Before a later one starts in another, the earlier is told to end, and what
there was of it is put here; of two that claim the same request the higher epoch wins, or who came first. An api process
that says nothing is waited for until a deadline, then passed over: it cannot keep others from going on.

Takes messages and the time, returns messages; does no I/O.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from onward.obs.metrics import Registry
from onward.proto.shelf import (
    Claim,
    Claimed,
    Delete,
    DropNamed,
    Dropped,
    Find,
    Forget,
    Found,
    FromShelf,
    Heard,
    Hello,
    Put,
    RecordKind,
    Release,
    Released,
    ShelfRecord,
    Show,
    Shown,
    ToShelf,
)
from onward.shelf.records import DEFAULT_BOUNDS, Bounds, Records, is_for

OTHERS_ANSWER_S = 0.3
"""How long an api process may take to say what it runs. Less than those who ask us wait for us."""
SETTLING_S = 2.0
"""How long whoever settles something may take to put it. An api process may wait half a second for each answer of ours."""
EXPIRE_EVERY_S = 1.0
MAX_QUESTIONS = 4096

Letters = list[tuple[str, FromShelf]]
"""To whom, and what."""


@dataclass(slots=True, eq=False)
class Question:
    """Something that others must be asked about first."""

    asker: str
    ask: Find | Claim
    deadline_s: float
    missing: set[str]
    best: ShelfRecord | None = None


class ShelfCore:
    def __init__(self, bounds: Mapping[RecordKind, Bounds] = DEFAULT_BOUNDS) -> None:
        self.records = Records(bounds)
        self.registry = Registry()
        self._apis: set[str] = set()
        self._questions: dict[int, Question] = {}
        self._claims: dict[str, int] = {}
        """Questions about claims, by the id of the request."""
        self._settling: dict[str, tuple[int, float]] = {}
        """Requests that somebody has ended and will put: under which epoch, and until when they are waited for."""
        self._numbers = itertools.count(1)
        self._next_expiry_s = 0.0
        self._evicted = self.registry.counter("onward_shelf_evicted_total", "Records that made room for others")
        self._count_into(self.registry)

    @property
    def num_questions(self) -> int:
        """That somebody waits for."""
        return len(self._questions)

    def receive(self, api: str, message: ToShelf, now_s: float) -> Letters:
        self._apis.add(api)
        match message:
            case Hello():
                return [(api, Heard(message.num_bytes))]
            case Put():
                self._put(message.record, now_s)
            case Forget():
                self.records.forget(message.record_id, message.epoch, message.caller, now_s)
            case Find():
                return self._find(api, message, now_s)
            case Claim():
                return self._claim(api, message, now_s)
            case DropNamed():
                meant = message.names, message.everything, message.caller, now_s
                dropped = sorted(self.records.drop_named(*meant))
                return [(api, Dropped(message.ask_id, dropped, self.records.open_named(*meant)))]
            case Delete():
                was_there = self.records.delete(message.record_id, message.caller, now_s)
                return [(api, Dropped(message.ask_id, [message.record_id] if was_there else []))]
            case Shown():
                return self._shown(api, message, now_s)
            case Released():
                return self._released(api, message, now_s)
        return []

    def api_gone(self, api: str, now_s: float) -> Letters:
        """It is dead. What it had put stays; what it ran is lost."""
        self._apis.discard(api)
        for number, question in list(self._questions.items()):
            if question.asker == api:
                self._close(number)
        return self._without(api, list(self._questions), now_s)

    def unreached(self, api: str, message: FromShelf, now_s: float) -> Letters:
        """It could not be told this."""
        return self._without(api, [message.number], now_s) if isinstance(message, Show | Release) else []

    def tick(self, now_s: float) -> Letters:
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            self.records.expire(now_s)
            self._settling = {name: one for name, one in self._settling.items() if one[1] > now_s}
        late = [number for number, question in self._questions.items() if question.deadline_s <= now_s]
        return [letter for number in late for letter in self._settle(number, now_s)]

    def _put(self, record: ShelfRecord, now_s: float) -> None:
        self._evicted.inc(by=self.records.put(record, now_s))

    def _find(self, api: str, ask: Find, now_s: float) -> Letters:
        record = self._own(ask, now_s)
        if record is not None and record.ending == "deleted":
            return [(api, Found(ask.ask_id, None))]
        if record is not None and (record.ending != "open" or 0 < ask.epoch <= record.epoch):
            return [(api, Found(ask.ask_id, record))]
        return self._ask_others(api, ask, now_s)

    def _claim(self, api: str, ask: Claim, now_s: float) -> Letters:
        kept = self.records.get(ask.record_id, now_s)
        if kept is not None and kept.ending in ("cancelled", "deleted"):
            return [(api, Claimed(ask.ask_id, max(kept.epoch, ask.epoch)))]
        settled_epoch = self._settled_epoch(ask.record_id, now_s)
        if settled_epoch is not None and settled_epoch >= ask.epoch:
            return [(api, Claimed(ask.ask_id, settled_epoch))]
        letters: Letters = []
        if (number := self._claims.get(ask.record_id)) is not None:
            rival = self._questions[number]
            if rival.ask.epoch >= ask.epoch:
                return [(api, Claimed(ask.ask_id, rival.ask.epoch))]
            self._close(number)
            letters = [(rival.asker, Claimed(rival.ask.ask_id, ask.epoch))]
        return letters + self._ask_others(api, ask, now_s)

    def _settled_epoch(self, record_id: str, now_s: float) -> int | None:
        """Of a response that was kept, or will be at once, as of this epoch: an earlier attempt knows nothing of that."""
        epoch, until_s = self._settling.get(record_id, (0, 0.0))
        if until_s > now_s:
            return epoch
        kept = self.records.get(record_id, now_s)
        return kept.epoch if kept is not None and kept.kind == "response" else None

    def _ask_others(self, api: str, ask: Find | Claim, now_s: float) -> Letters:
        others = self._apis - {api}
        if len(self._questions) >= MAX_QUESTIONS:
            others = set()
        number = next(self._numbers)
        self._questions[number] = Question(api, ask, now_s + OTHERS_ANSWER_S, others)
        if isinstance(ask, Claim):
            self._claims[ask.record_id] = number
        if not others:
            return self._settle(number, now_s)
        message = _question_to_others(number, ask)
        return [(other, message) for other in sorted(others)]

    def _shown(self, api: str, message: Shown, now_s: float) -> Letters:
        question = self._questions.get(message.number)
        if question is None or api not in question.missing:
            return []
        assert isinstance(question.ask, Find), "it was asked to show it"
        if message.record is not None and is_for(message.record, question.ask.caller):
            question.best = _later(question.best, message.record)
        is_enough = question.best is not None and 0 < question.ask.epoch <= question.best.epoch
        return self._settle(message.number, now_s) if is_enough else self._without(api, [message.number], now_s)

    def _released(self, api: str, message: Released, now_s: float) -> Letters:
        question = self._questions.get(message.number)
        if question is None or api not in question.missing:
            return []  # whoever claimed it has gone on without
        if message.record is not None:
            self._put(message.record, now_s)
        if message.held_epoch is not None:
            self._close(message.number)
            return [(question.asker, Claimed(question.ask.ask_id, message.held_epoch))]
        return self._without(api, [message.number], now_s)

    def _without(self, api: str, numbers: list[int], now_s: float) -> Letters:
        """These questions wait for that one no longer."""
        letters: Letters = []
        for number in numbers:
            question = self._questions.get(number)
            if question is not None and api in question.missing:
                question.missing.discard(api)
                letters += [] if question.missing else self._settle(number, now_s)
        return letters

    def _settle(self, number: int, now_s: float) -> Letters:
        """With what is known by now. Whoever has just left a stream has put it before it could say that it has none."""
        question = self._close(number)
        ask = question.ask
        if isinstance(ask, Claim):
            if ask.settles and len(self._settling) < MAX_QUESTIONS:
                self._settling[ask.record_id] = ask.epoch, now_s + SETTLING_S
            return [(question.asker, Claimed(ask.ask_id))]
        own = self._own(ask, now_s)
        if own is not None and own.ending == "deleted":
            return [(question.asker, Found(ask.ask_id, None))]
        return [(question.asker, Found(ask.ask_id, own if question.best is None else _later(own, question.best)))]

    def _close(self, number: int) -> Question:
        question = self._questions.pop(number)
        if self._claims.get(question.ask.record_id) == number:
            del self._claims[question.ask.record_id]
        return question

    def _own(self, ask: Find, now_s: float) -> ShelfRecord | None:
        record = self.records.get(ask.record_id, now_s)
        return record if record is not None and is_for(record, ask.caller) else None

    def _count_into(self, registry: Registry) -> None:
        records = self.records
        registry.gauge(
            "onward_shelf_records",
            "Records of streams whose client has gone",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in records.count().items()},
        )
        registry.gauge(
            "onward_shelf_bytes",
            "Their size",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in records.num_bytes().items()},
        )


def _question_to_others(number: int, ask: Find | Claim) -> FromShelf:
    if isinstance(ask, Claim):
        return Release(number, ask.record_id, ask.epoch, ask.caller)
    return Show(number, ask.record_id)


def _later(first: ShelfRecord | None, second: ShelfRecord) -> ShelfRecord:
    return first if first is not None and first.epoch > second.epoch else second

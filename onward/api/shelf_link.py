"""An api process's way to the shelf of its instance: puts without waiting, asks with a deadline, answers what it is asked.

A shelf that is away, silent or behind costs records and never holds a request up: what it does not say in time counts as
unknown, unless somebody has nothing to go on with but that. Knows nothing of what is in a record.
"""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from onward import log
from onward.errors import Unavailable
from onward.obs.metrics import Registry
from onward.proto.control import ShelfGone, ShelfUp
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
    Release,
    Released,
    ShelfRecord,
    Show,
    Shown,
    ToShelf,
)
from onward.shares import fits

ANSWER_S = 0.5
HELLO_EVERY_S = 1.0
MAX_ASKS = 256
DROP_TRIES = 3
"""An abort must not be forgotten."""
MAX_UNHEARD_BYTES = 32 << 20
"""Of records that are on their way, of all callers. What exceeds a caller's share (`shares.fits`) is not kept."""
HELLO_BYTES = 4 << 20
"""So much on its way is asked about before the next second."""

_logger = logging.getLogger(__name__)


class Wire(Protocol):
    """What `transport.shelf.ShelfSocket` does."""

    def send(self, message: ToShelf) -> bool: ...
    async def receive(self) -> FromShelf: ...
    def close(self) -> None: ...


class Runner(Protocol):
    """Who knows what runs here."""

    def show(self, record_id: str) -> ShelfRecord | None: ...
    def release(self, record_id: str, epoch: int, caller: str) -> ShelfRecord | int | None:
        """Ends the caller's earlier attempt and returns what there was of it; or the epoch of one that does not end."""
        ...


@dataclass(slots=True, eq=False)
class Starting:
    """An attempt that has been claimed, and does not run yet."""

    record_id: str
    epoch: int
    is_granted: bool = False
    overtaken_by: int | None = None


class ShelfLink:
    def __init__(self, connect: Callable[[str], Wire], on_fault: Callable[[], None], registry: Registry) -> None:
        self._connect, self._on_fault = connect, on_fault
        self._lost = registry.counter("onward_shelf_lost_total", "Records that the shelf was not there to take")
        self._runner: Runner | None = None
        self._wire: Wire | None = None
        self._has_met = asyncio.Event()
        """A shelf: until then we have just started, and it is worth waiting for."""
        self._shelf = ""
        self._reading: asyncio.Task[None] | None = None
        self._greeting: asyncio.TimerHandle | None = None
        self._ask_ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._starting: dict[int, Starting] = {}
        """By the id of the claim."""
        self._num_put = self._num_greeted = self._num_heard = 0
        """Bytes: sent, sent at the last hello, and known to have arrived."""
        self._unheard: deque[tuple[int, str, int]] = deque()
        """Of each record on its way: the bytes sent with it, its caller and its own bytes."""
        self._unheard_bytes: Counter[str] = Counter()
        """By caller."""

    def attach(self, runner: Runner) -> None:
        self._runner = runner

    def shelf_up(self, message: ShelfUp) -> None:
        self._disconnect()
        self._shelf, self._wire = message.incarnation, self._connect(message.address)
        self._has_met.set()
        self._num_put = self._num_greeted = self._num_heard = 0
        self._unheard.clear()
        self._unheard_bytes.clear()
        self._reading = asyncio.get_running_loop().create_task(self._read_for_ever(self._wire))
        self._reading.add_done_callback(self._read_ended)
        self._greet()

    def shelf_gone(self, message: ShelfGone) -> None:
        if message.incarnation == self._shelf:
            _logger.warning(log.event("shelf gone", incarnation=message.incarnation))
            self._disconnect()

    def put(self, record: ShelfRecord) -> None:
        """Fire and forget, within a bound."""
        num_bytes, caller = len(record.data), record.caller
        own = self._unheard_bytes[caller]
        of_others = self._unheard_bytes.total() - own
        has_room = fits(num_bytes, own, of_others, MAX_UNHEARD_BYTES, is_named=bool(caller))
        if not has_room or not self._send(Put(record)):
            self._lost.inc()
            return
        self._num_put += num_bytes
        self._unheard.append((self._num_put, caller, num_bytes))
        self._unheard_bytes[caller] += num_bytes
        if self._num_put - self._num_greeted > HELLO_BYTES:
            self._say_hello()

    def forget(self, record_id: str, epoch: int, caller: str) -> None:
        self._send(Forget(record_id, epoch, caller))

    async def find(
        self, record_id: str, epoch: int, caller: str | None, *, must_answer: bool = False
    ) -> ShelfRecord | None:
        """`must_answer`: silence is no "unknown", but `Unavailable`."""
        answer = await self._ask(Find(next(self._ask_ids), record_id, epoch, caller))
        if isinstance(answer, Found):
            return answer.record
        if must_answer:
            raise Unavailable("it cannot be said at this moment what is kept here; ask again", retry_after_s=1.0)
        return None

    async def claim(self, record_id: str, epoch: int, caller: str, *, settles: bool = False) -> int | None:
        """Before a later attempt: ends those that run in other processes. Returns the epoch of one that is not earlier;
        None: this one may start, before anything else is waited for. `settles`: none starts, but an end is put."""
        ask = Claim(next(self._ask_ids), record_id, epoch, caller, settles)
        starting = self._starting[ask.ask_id] = Starting(record_id, epoch)
        try:
            answer = await self._ask(ask)
        finally:
            del self._starting[ask.ask_id]
        if isinstance(answer, Claimed) and answer.held_epoch is not None:
            return answer.held_epoch
        return starting.overtaken_by

    async def drop_named(self, names: Collection[str], everything: bool, caller: str | None) -> Dropped:
        return await self._dropped(lambda ask_id: DropNamed(ask_id, list(names), everything, caller))

    async def delete(self, record_id: str, caller: str) -> None:
        await self._dropped(lambda ask_id: Delete(ask_id, record_id, caller))

    async def _dropped(self, ask: Callable[[int], DropNamed | Delete]) -> Dropped:
        """A shelf that is away has nothing."""
        for _ in range(DROP_TRIES):
            if self._wire is None:
                break
            answer = await self._ask(ask(next(self._ask_ids)))
            if isinstance(answer, Dropped):
                return answer
        if self._wire is None:
            return Dropped(0, [])
        raise Unavailable("records of streams could not be dropped; ask again", retry_after_s=1.0)

    async def close(self) -> None:
        reading = self._reading
        self._disconnect()
        if reading is not None:
            await asyncio.wait([reading])

    async def _ask(self, ask: Find | Claim | DropNamed | Delete) -> Found | Claimed | Dropped | None:
        """None: no answer in time, or none to be expected."""
        if len(self._asked) >= MAX_ASKS:
            return None
        if not await self._meets_shelf():
            return None
        answer = self._asked[ask.ask_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(answer, ANSWER_S) if self._send(ask) else None
        except TimeoutError:
            return None
        finally:
            del self._asked[ask.ask_id]

    async def _meets_shelf(self) -> bool:
        if self._has_met.is_set():
            return True
        try:
            await asyncio.wait_for(self._has_met.wait(), ANSWER_S)
        except TimeoutError:
            return False
        return True

    def _send(self, message: ToShelf) -> bool:
        return self._wire is not None and self._wire.send(message)

    async def _read_for_ever(self, wire: Wire) -> None:
        while True:
            self._on_message(await wire.receive())

    def _on_message(self, message: FromShelf) -> None:
        assert self._runner is not None, "there are streams before there is a shelf"
        match message:
            case Heard():
                self._hear(message.num_bytes)
            case Show():
                self._send(Shown(message.number, self._runner.show(message.record_id)))
            case Release():
                self._send(self._released(self._runner, message))
            case Found() | Claimed() | Dropped():
                self._answered(message)

    def _hear(self, num_bytes: int) -> None:
        self._num_heard = max(self._num_heard, num_bytes)
        while self._unheard and self._unheard[0][0] <= self._num_heard:
            _, caller, size = self._unheard.popleft()
            self._unheard_bytes[caller] -= size
            if not self._unheard_bytes[caller]:
                del self._unheard_bytes[caller]

    def _answered(self, message: Found | Claimed | Dropped) -> None:
        starting = self._starting.get(message.ask_id)
        if starting is not None and isinstance(message, Claimed):
            # At once: the next message may be another's claim, and come before whoever waits for this is awake.
            starting.is_granted = message.held_epoch is None
        answer = self._asked.get(message.ask_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _released(self, runner: Runner, message: Release) -> Released:
        for starting in self._starting.values():
            if starting.record_id != message.record_id or not starting.is_granted:
                continue
            if starting.epoch >= message.epoch:
                return Released(message.number, held_epoch=starting.epoch)
            starting.overtaken_by = message.epoch
        had = runner.release(message.record_id, message.epoch, message.caller)
        return Released(message.number, held_epoch=had) if isinstance(had, int) else Released(message.number, had)

    def _greet(self) -> None:
        """Each second: so the shelf knows us, and we how far it is."""
        self._say_hello()
        self._greeting = asyncio.get_running_loop().call_later(HELLO_EVERY_S, self._greet)

    def _say_hello(self) -> None:
        if self._send(Hello(self._num_put)):
            self._num_greeted = self._num_put

    def _disconnect(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        if self._reading is not None:
            self._reading.cancel()
        if self._wire is not None:
            self._wire.close()
        self._wire = self._reading = self._greeting = None
        self._shelf = ""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    def _read_ended(self, task: asyncio.Task[None]) -> None:
        """It ends only by being cancelled. Anything else is a fault of ours, and the process must not go on."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            _logger.critical("the link to the shelf has failed", exc_info=fault)
            self._on_fault()

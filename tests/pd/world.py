"""Prefill and decode instances around the real machines, a network that misbehaves, and a model of KV memory.

The memory is that of the decode instance: each block has contents, and a lease may own it. A write into a block
that its lease does not own any more corrupts other KV, and fails the run. As in the real data
plane, a push must find its lease open, and a revoked lease is quiet when its writer has stopped or died.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from onward.pd import handoff_errors
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.handoff_events import (
    GrantReceived,
    HandoffCancelled,
    HandoffCompleted,
    HandoffFailed,
    HandoffKey,
    KvArrived,
    OfferReceived,
    PrefillRequested,
)
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.handoff import LeaseGrant, PrefillDone, ToDecode, ToPrefill
from tests.pd.messages import ENDPOINT, prefill

STEP_S = 0.05
TIMES = HandoffTimeouts(lease_s=1.0, offer_hold_s=0.3, handoff_timeout_s=4.0)
NUM_BLOCKS = 6
OWN_CHOICE = handoff_errors.prefill_failed("given up by its own side")


@dataclass(frozen=True)
class Weather:
    """What can go wrong, as probabilities: of each message, or of each step of an instance."""

    loss: float = 0.0
    doubling: float = 0.0
    max_delay_s: float = 0.0
    """Each message has its own delay, so they overtake each other."""
    restart: float = 0.0
    pause: float = 0.0
    renewal: float = 0.0
    whim: float = 0.0
    """An engine refuses, cancels or fails for reasons of its own."""
    damage: float = 0.0
    """A block is not what was sent."""
    hesitation: float = 0.0
    """The decode engine leaves an offer for later."""


CALM = Weather()


@dataclass
class Memory:
    """One incarnation of a decode instance's KV memory."""

    owner: list[str | None] = field(default_factory=lambda: [None] * NUM_BLOCKS)
    contents: list[int] = field(default_factory=lambda: [0] * NUM_BLOCKS)
    open_leases: dict[str, list[int]] = field(default_factory=dict)
    revoked: dict[str, list[int]] = field(default_factory=dict)
    """Not reusable before their writers are quiet."""

    def take(self, lease_id: str, count: int) -> list[int] | None:
        free = [block for block, owner in enumerate(self.owner) if owner is None]
        if len(free) < count:
            return None
        for block in free[:count]:
            self.owner[block] = lease_id
            self.contents[block] = 0
        self.open_leases[lease_id] = free[:count]
        return free[:count]

    def revoke(self, lease_id: str) -> None:
        self.revoked[lease_id] = self.open_leases.pop(lease_id)

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owner[block] = None

    def write(self, lease_id: str, block: int, value: int) -> None:
        assert self.owner[block] == lease_id, "a block was written by somebody who does not own it"
        self.contents[block] = value


@dataclass
class Push:
    """A writer at work."""

    lease_id: str
    memory: Memory
    blocks: list[int]
    sums: list[int] = field(default_factory=list)


class Instance:
    """With a clock of its own, and pauses in which it does nothing (SIGSTOP)."""

    def __init__(self, world: "World", rate: float) -> None:
        self.world = world
        self.rate = rate
        self.offset_s = world.random.uniform(0, 1000)
        self.inbox: deque[tuple[str, Any]] = deque()
        self.paused_until_s = 0.0
        self.was_paused = False

    @property
    def now_s(self) -> float:
        return self.offset_s + self.world.now_s * self.rate


class PrefillInstance(Instance):
    def __init__(self, world: "World", address: str, rate: float) -> None:
        super().__init__(world, rate)
        self.address = address
        self.side = PrefillHandoffProtocol(world.name(address), TIMES)
        self.queue: list[HandoffKey] = []
        self.pushes: dict[HandoffKey, Push] = {}

    def turn(self) -> None:
        while self.inbox:
            sender, message = self.inbox.popleft()
            self.side.receive(sender, message, self.now_s)
        self.side.tick(self.now_s)
        for event in self.side.take_events():
            self._handle(event)
        self._work()
        for decode, message in self.side.take_messages():
            self.world.send(decode, self.address, message)

    def _handle(self, event: PrefillRequested | GrantReceived | HandoffCompleted | HandoffCancelled) -> None:
        self.world.seen[type(event).__name__] += 1
        match event:
            case PrefillRequested():
                self.queue.append(event.key)
            case GrantReceived():
                self._open(event.key, event.grant)
            case HandoffCompleted():
                assert event.key not in self.pushes, "taken while it was still being written"
            case HandoffCancelled():
                self._release(event.key)

    def _open(self, key: HandoffKey, grant: LeaseGrant) -> None:
        memory = self.world.memories[key.decode_incarnation]
        if grant.lease_id not in memory.open_leases:
            self.side.fail(key, handoff_errors.transfer_failed("the door is shut"), self.now_s)
            return
        assert all(push.lease_id != grant.lease_id for push in self.world.pushes()), "two writers under one lease"
        self.pushes[key] = Push(grant.lease_id, memory, grant.block_ids)

    def _release(self, key: HandoffKey) -> None:
        self.pushes.pop(key, None)
        if key in self.queue:
            self.queue.remove(key)

    def _work(self) -> None:
        world = self.world
        if world.happens(world.weather.renewal):
            self.side.reset(world.name(self.address), self.now_s)
        for key in [*self.queue, *self.pushes]:
            if world.happens(world.weather.whim):
                self._release(key)
                self.side.fail(key, OWN_CHOICE, self.now_s)
        if self.queue and world.random.random() < 0.5:
            self.side.offer(self.queue.pop(0), world.random.randint(1, 3), self.now_s)
        for key, push in list(self.pushes.items()):
            self._write(key, push)

    def _write(self, key: HandoffKey, push: Push) -> None:
        world = self.world
        if len(push.sums) < len(push.blocks):
            value = world.random.getrandbits(32) + 1
            damaged = world.happens(world.weather.damage)
            push.memory.write(push.lease_id, push.blocks[len(push.sums)], value + damaged)
            push.sums.append(value)
            return
        del self.pushes[key]
        done = PrefillDone(key.handoff_id, self.side.incarnation, [1], 0, checksums=push.sums)
        self.side.ready(key, done, self.now_s)
        world.finished_writers.add(push.lease_id)


class DecodeInstance(Instance):
    def __init__(self, world: "World", rate: float) -> None:
        super().__init__(world, rate)
        self.side = DecodeHandoffProtocol(world.name("decode"), TIMES)
        self.memory = world.memories[self.side.incarnation] = Memory()
        self.asked: set[int] = set()
        self.peer_of: dict[int, str] = {}
        self.offers: dict[int, int] = {}
        self.leases: dict[int, str] = {}
        self.outcomes: Counter[int] = Counter()

    def ask(self, address: str) -> int:
        number = self.side.next_handoff_id()
        self.asked.add(number)
        self.peer_of[number] = address
        self.side.request_prefill(address, prefill(number), self.now_s)
        return number

    def turn(self) -> None:
        while self.inbox:
            sender, message = self.inbox.popleft()
            self.side.receive(sender, message, self.now_s)
        self._read_data_plane()
        self.side.tick(self.now_s)
        for event in self.side.take_events():
            self._handle(event)
        self._answer_offers()
        self._change_of_mind()
        for peer, message in self.side.take_messages():
            self.world.send(peer, self.side.incarnation, message)

    def _read_data_plane(self) -> None:
        """Reports come a little later than what they report; a lost writer is sometimes noticed only by its silence."""
        writing = {push.lease_id for push in self.world.pushes()}
        for lease_id, blocks in list(self.memory.open_leases.items()):
            if self.world.random.random() < 0.5:
                continue
            if lease_id in self.world.finished_writers:
                self.side.on_kv_received(
                    self._handoff_of(lease_id), [self.memory.contents[block] for block in blocks], self.now_s
                )
            elif lease_id in self.world.begun_writers - writing and self.world.random.random() < 0.1:
                self.side.on_sender_lost(self._handoff_of(lease_id), "its connection ended", self.now_s)
        for lease_id, blocks in list(self.memory.revoked.items()):
            if lease_id not in writing:
                self.memory.free(blocks)
                del self.memory.revoked[lease_id]

    def _handle(self, event: OfferReceived | KvArrived | HandoffFailed) -> None:
        number = event.handoff_id
        assert not self.outcomes[number], "an event after the end"
        match event:
            case OfferReceived():
                assert number not in self.leases, "offered again after it was granted"
                self.offers[number] = event.num_blocks
            case KvArrived():
                self.world.seen["KvArrived"] += 1
                self._take(number, event.ready)
            case HandoffFailed():
                self.world.seen[event.error.code] += 1
                self._check_end(number, event)
                self._end(number)

    def _take(self, number: int, ready: PrefillDone) -> None:
        self.outcomes[number] += 1
        lease_id = self.leases.pop(number)
        blocks = self.memory.open_leases.pop(lease_id)
        assert all(push.lease_id != lease_id for push in self.world.pushes()), "taken while it is still written"
        assert [self.memory.contents[block] for block in blocks] == ready.checksums, "incomplete data was taken"
        self.memory.free(blocks)

    def _check_end(self, number: int, event: HandoffFailed) -> None:
        lease_id = self.leases.get(number)
        writer = self.world.prefills[self.peer_of[number]]
        gave_up = "prefill instance was silent" in event.error.message
        if gave_up and lease_id and not (writer.was_paused or self.was_paused):
            writing = [push.lease_id for push in self.world.pushes()]
            assert lease_id not in writing, "the decode side gave up before the writer had stopped"

    def _handoff_of(self, lease_id: str) -> int:
        return next(number for number, granted in self.leases.items() if granted == lease_id)

    def _end(self, number: int) -> None:
        self.outcomes[number] += 1
        self.offers.pop(number, None)
        lease_id = self.leases.pop(number, None)
        if lease_id is not None:
            self.memory.revoke(lease_id)

    def _answer_offers(self) -> None:
        world = self.world
        for number, num_blocks in list(self.offers.items()):
            if world.happens(world.weather.whim):
                self.side.refuse(number, handoff_errors.no_decode_blocks("no"), self.now_s)
                self._end(number)
                continue
            lease_id = f"{self.side.incarnation}/{number}"
            blocks = None if world.happens(world.weather.hesitation) else self.memory.take(lease_id, num_blocks)
            if blocks is not None:
                del self.offers[number]
                self.leases[number] = lease_id
                grant = LeaseGrant(number, "", lease_id, ENDPOINT, 0, blocks, TIMES.lease_s, True)
                assert self.side.grant(grant, self.now_s)

    def _change_of_mind(self) -> None:
        for number in self.asked:
            if not self.outcomes[number] and self.world.happens(self.world.weather.whim):
                self.side.cancel(number, OWN_CHOICE, self.now_s)
                self._end(number)


class World:
    def __init__(self, seed: int, num_prefills: int, max_drift: float) -> None:
        self.random = Random(seed)
        self.max_drift = max_drift
        self.weather = CALM
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self.memories: dict[str, Memory] = {}
        self.finished_writers: set[str] = set()
        self.begun_writers: set[str] = set()
        self._num_names = 0
        self._num_sent = 0
        self._under_way: list[tuple[float, int, str, str, ToDecode | ToPrefill]] = []
        self.prefills = {f"p{i}": PrefillInstance(self, f"p{i}", self._rate()) for i in range(num_prefills)}
        self.decode = DecodeInstance(self, self._rate())

    def run(self, weather: Weather, seconds: float, ask: float = 0.0) -> None:
        """`ask`: how likely a new handoff is in each step."""
        self.weather = weather
        for _ in range(round(seconds / STEP_S)):
            if self.happens(ask, "asked"):
                self.decode.ask(self.random.choice(list(self.prefills)))
            self._step()

    def _step(self) -> None:
        self.now_s += STEP_S
        self._deliver()
        for address in self.prefills:
            if self.happens(self.weather.restart, "prefill restarted"):
                self.prefills[address] = PrefillInstance(self, address, self._rate())
        if self.happens(self.weather.restart, "decode restarted"):
            self._restart_decode()
        for instance in (*self.prefills.values(), self.decode):
            self._let_run(instance)

    def _let_run(self, instance: PrefillInstance | DecodeInstance) -> None:
        if self.happens(self.weather.pause, "paused"):
            instance.paused_until_s = self.now_s + self.random.uniform(0, 2 * TIMES.lease_s)
            instance.was_paused = True
        if self.now_s >= instance.paused_until_s:
            instance.turn()
        self.begun_writers.update(push.lease_id for push in self.pushes())

    def _restart_decode(self) -> None:
        if self.random.random() < 0.5:
            self.decode.side.close()
            for peer, message in self.decode.side.take_messages():
                self.send(peer, self.decode.side.incarnation, message)
        self.decode = DecodeInstance(self, self._rate())

    def send(self, to: str, sender: str, message: ToDecode | ToPrefill) -> None:
        if self.happens(self.weather.loss, "lost"):
            return
        copies = 2 if self.happens(self.weather.doubling, "doubled") else 1
        for _ in range(copies):
            at_s = self.now_s + self.random.uniform(0, self.weather.max_delay_s)
            self._num_sent += 1
            self._under_way.append((at_s, self._num_sent, to, sender, message))

    def _deliver(self) -> None:
        due = sorted((item for item in self._under_way if item[0] <= self.now_s), key=lambda item: item[:2])
        self._under_way = [item for item in self._under_way if item[0] > self.now_s]
        for _, _, to, sender, message in due:
            if to in self.prefills:
                self.prefills[to].inbox.append((sender, message))
            elif to == self.decode.side.incarnation:
                self.decode.inbox.append((sender, message))

    def pushes(self) -> Iterator[Push]:
        return (push for instance in self.prefills.values() for push in instance.pushes.values())

    def happens(self, probability: float, name: str = "") -> bool:
        if probability and self.random.random() < probability:
            self.seen[name] += 1
            return True
        return False

    def name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}-{self._num_names}"

    def _rate(self) -> float:
        return self.random.uniform(1 - self.max_drift, 1 + self.max_drift)

    def check_nothing_is_left(self) -> None:
        assert not any(self.decode.side.count_by_state().values()), "the decode side has not ended"
        for instance in self.prefills.values():
            assert not any(instance.side.count_by_state().values()), "a prefill side has not ended"
            assert not instance.queue
        assert not list(self.pushes()), "somebody still writes"
        assert self.decode.memory.owner == [None] * NUM_BLOCKS, "blocks were not given back"
        outcomes = {number: self.decode.outcomes[number] for number in self.decode.asked}
        assert outcomes == dict.fromkeys(self.decode.asked, 1), "not exactly one end for each handoff"

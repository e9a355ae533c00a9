"""A one-way wire between two processes: messages arrive later, in order, or not at all, depending on the wire's kind
and the active faults.

All messages are encoded and decoded as on the real wire. So processes cannot share objects by accident, and data that
the encoding loses is noticed.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from onward.sim.loop import START_S, VirtualLoop
from onward.sim.process import SimProcess
from onward.sim.seeded_random import SeededRandom


class Trace:
    """The lines of a run's trace, and a digest of it. Two runs with equal digests were the same run."""

    def __init__(self, loop: VirtualLoop, keeps_lines: bool = False, keeps_messages: bool = False) -> None:
        self._loop = loop
        self._keeps_lines = keeps_lines
        self._keeps_messages = keeps_messages
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: list[str] = []
        self._is_closed = False

    @property
    def at_s(self) -> float:
        """Seconds since the start."""
        return self._loop.now_s - START_S

    def note(self, what: str) -> None:
        """Adds a line for readers of the trace."""
        if self._is_closed:
            return
        line = f"{self.at_s:9.4f}  {what}"
        self._hash.update(line.encode())
        if self._keeps_lines:
            self.lines.append(line)

    def message(self, wire: str, kind: str, fate: str = "") -> None:
        if self._is_closed:
            return
        self._hash.update(f"{self._loop.now_s:.6f}{wire}{kind}{fate}".encode())
        if self._keeps_messages and self._keeps_lines:
            self.lines.append(f"{self.at_s:9.4f}  {wire}  {kind}{'  ' + fate if fate else ''}")

    def close(self) -> None:
        """Ends the trace. All that follows is part of the teardown, and is not recorded."""
        self._is_closed = True

    def digest(self) -> str:
        return self._hash.hexdigest()


SLOW_S = 1.5
"""Approximate delay of a message on a slow wire."""
Watcher = Callable[[str, str], None]


@dataclass(eq=False, slots=True)
class ActiveFault:
    """A fault in force. It hits each message with probability `rate`, on all wires whose names contain `target`. An
    empty `target` means all wires. For faults of KV transfers, the name of the process must contain `target`
    instead."""

    kind: str
    target: str
    rate: float


class ActiveFaults:
    """The faults that are in force on wires, and how often each kind of fault has taken effect."""

    def __init__(self, random: SeededRandom) -> None:
        self._random = random
        self._faults: list[ActiveFault] = []
        self.trigger_counts: Counter[str] = Counter()
        self.num_killed_for_silence = 0
        """Processes that a supervisor has killed because they did not answer, whether or not a fault was the cause."""

    def begin(self, kind: str, target: str, rate: float) -> ActiveFault:
        fault = ActiveFault(kind, target, rate)
        self._faults.append(fault)
        return fault

    def end(self, fault: ActiveFault) -> None:
        self._faults.remove(fault)

    @property
    def is_empty(self) -> bool:
        return not self._faults

    def hits(self, kind: str, wire: str) -> bool:
        """Returns whether a fault of this kind hits the message on this wire, and counts it."""
        for fault in self._faults:
            if fault.kind == kind and fault.target in wire and self._random.happens(fault.rate):
                self.trigger_counts[kind] += 1
                return True
        return False


@dataclass(slots=True, eq=False)
class SimContext:
    """State that all wires and processes of a run share."""

    loop: VirtualLoop
    random: SeededRandom
    active_faults: ActiveFaults
    trace: Trace
    delay_s: float
    watchers: list[Watcher]
    """Called for each message that is sent, with the wire's name and the message's type."""
    is_over: bool = False
    """The run has ended. What its processes do during the teardown is not checked."""


class SimWire:
    def __init__(
        self,
        context: SimContext,
        name: str,
        sender: SimProcess,
        receiver: SimProcess,
        deliver: Callable[[Any], None],
        message_type: Any,
        *,
        may_lose: bool = True,
        may_reorder: bool = False,
    ) -> None:
        self.name = name
        self._context = context
        self._sender, self._receiver, self._deliver = sender, receiver, deliver
        self._may_lose, self._may_reorder = may_lose, may_reorder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._random = context.random.substream(name)
        self._last_s = 0.0
        self._receiver_context = receiver.context()

    def send(self, message: Any) -> None:
        if self._sender.is_dead:
            return
        context, active_faults = self._context, self._context.active_faults
        kind = type(message).__name__
        if active_faults.is_empty:
            context.trace.message(self.name, kind)
            self._post(message, self._random.jittered(context.delay_s))
        elif self._may_lose and (
            active_faults.hits("partition", self.name) or active_faults.hits("lose", f"{self.name} {kind}")
        ):
            context.trace.message(self.name, kind, "lost")
        else:
            context.trace.message(self.name, kind)
            is_slow = not self._may_lose and active_faults.hits("partition", self.name)
            delay_s = SLOW_S if is_slow or active_faults.hits("delay", self.name) else context.delay_s
            self._post(message, self._random.jittered(delay_s))
            if self._may_lose and active_faults.hits("repeat", self.name):
                self._post(message, self._random.jittered(10 * context.delay_s))
        for watcher in context.watchers:
            watcher(self.name, kind)

    def _post(self, message: Any, delay_s: float) -> None:
        loop = self._context.loop
        at_s = loop.now_s + delay_s
        if not (self._may_reorder and self._context.active_faults.hits("reorder", self.name)):
            at_s = self._last_s = max(at_s, self._last_s)
        encoded = self._encoder.encode(message)
        loop.call_at_global(at_s, self._receiver_context, self._arrive, encoded)

    def _arrive(self, encoded: bytes) -> None:
        if not self._receiver.is_dead:
            self._deliver(self._decoder.decode(encoded))

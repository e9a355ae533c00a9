"""A hash worker's data plane: the same commands and reports as the real one, and writes that land when they are told to.

Whoever runs the planes moves one write after another with `PlaneNetwork.step`. A write lies either at its writer or in the
target's memory, as with shared memory; it lands whether the lease still stands or not, and the canary looks: a write to a
block that no lease covers, or whose lease was declared quiet, is what must never happen.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from onward.proto.kv_transfer import (
    Counted,
    EndLease,
    Expect,
    Expecting,
    KvCommand,
    KvReport,
    LeaseQuiet,
    Push,
    PushFailed,
    PushQuiet,
    Revoke,
    Sent,
    StopPush,
    WriterLost,
)

Memory = list["array[int]"]


class CanaryDied(AssertionError):
    """A block was written by somebody who may not."""


@dataclass(slots=True)
class Expected:
    """A lease on our memory."""

    missing: set[int]
    blocks: list[int]
    checksums: bool
    revoked: bool = False


@dataclass(slots=True)
class Pushing:
    push: Push
    block_ids: list[int]
    memory: Memory
    num_pushed: int = 0
    """Blocks of the request that were put on their way, or that the peer has."""
    joined: bool = False
    """The target was asked whether the lease stands. From then on it must not be forgotten without our word."""


class Write(NamedTuple):
    lease_id: str
    address: str
    source: int
    target: int
    memory: Memory


@dataclass(slots=True)
class DataPlane:
    address: str
    memory: Memory = field(default_factory=list)
    expected: dict[str, Expected] = field(default_factory=dict)
    pushes: dict[str, Pushing] = field(default_factory=dict)
    outgoing: deque[Write] = field(default_factory=deque)
    reports: list[KvReport] = field(default_factory=list)
    stalled: bool = False
    """Its process is stopped: it neither writes nor answers."""
    slow_targets: set[str] = field(default_factory=set)
    """Peers to which nothing moves for now."""
    unheard: list[KvCommand] = field(default_factory=list)
    """Said while it was stalled."""
    stopped: set[str] = field(default_factory=set)
    """Pushes that were stopped: the command may overtake the step that opens one."""
    notify: Callable[[], None] = lambda: None
    """There is a report."""

    @property
    def is_busy(self) -> bool:
        return bool(self.outgoing) or any(lease.revoked for lease in self.expected.values())

    def report(self, report: KvReport) -> None:
        self.reports.append(report)
        self.notify()

    def command(self, command: KvCommand) -> None:
        if self.stalled:
            self.unheard.append(command)
            return
        match command:
            case Expect():
                self.expected[command.lease_id] = Expected(set(command.block_ids), command.block_ids, command.checksums)
                self.report(Expecting(command.lease_id))
            case EndLease():
                del self.expected[command.lease_id]
            case Revoke():
                # Quiet when the writer says so; `PlaneNetwork` asks it.
                if command.lease_id in self.expected:
                    self.expected[command.lease_id].revoked = True
                else:
                    self.report(LeaseQuiet(command.lease_id))
            case StopPush():
                self.drop_push(command.lease_id)
                self.stopped.add(command.lease_id)
                self.report(PushQuiet(command.lease_id))

    def open_push(self, push: Push, block_ids: list[int], memory: Memory) -> None:
        if push.lease_id not in self.stopped:
            self.pushes[push.lease_id] = Pushing(push, block_ids, memory, push.first_block)

    def advance_push(self, lease_id: str, num_computed_blocks: int) -> None:
        """So many leading blocks of the request are final."""
        pushing = self.pushes.get(lease_id)
        if pushing is None:
            return
        for index in range(pushing.num_pushed, num_computed_blocks):
            target = pushing.push.block_ids[index - pushing.push.first_block]
            write = Write(lease_id, pushing.push.endpoint.address, pushing.block_ids[index], target, pushing.memory)
            self.outgoing.append(write)
        pushing.num_pushed = max(pushing.num_pushed, num_computed_blocks)

    def next_write(self) -> Write | None:
        """The oldest one that can move. A slow peer holds up its own only."""
        for index, write in enumerate(self.outgoing):
            if write.address not in self.slow_targets:
                del self.outgoing[index]
                return write
        return None

    def drop_push(self, lease_id: str) -> None:
        self.pushes.pop(lease_id, None)
        self.outgoing = deque(write for write in self.outgoing if write.lease_id != lease_id)


class PlaneNetwork:
    """All planes by address. Nothing moves but by `step`."""

    def __init__(self) -> None:
        self._planes: dict[str, DataPlane] = {}

    def add(self, plane: DataPlane) -> None:
        self._planes[plane.address] = plane

    def remove(self, address: str) -> None:
        """Its process is dead, and its memory with it: writers to it fail, and what it was writing is lost."""
        dead = self._planes.pop(address)
        for plane in self._planes.values():
            for lease_id, pushing in list(plane.pushes.items()):
                if pushing.push.endpoint.address == address:
                    plane.drop_push(lease_id)
                    plane.report(PushFailed(lease_id, "the peer is gone"))
            for lease_id in dead.pushes:
                if lease_id in plane.expected and not plane.expected[lease_id].revoked:
                    plane.report(WriterLost(lease_id, "the writer is gone"))

    def step(self) -> bool:
        """Every plane that is not stalled moves one write; revoked leases whose writer has stopped become quiet."""
        planes = list(self._planes.values())
        moved = [self.move(plane) for plane in planes]
        return any([*moved, *(self.quiet(plane) for plane in planes)])

    def move(self, plane: DataPlane) -> bool:
        """One write of this plane lands."""
        if plane.stalled:
            return False
        unheard, plane.unheard = plane.unheard, []
        for command in unheard:
            plane.command(command)
        write = plane.next_write()
        if write is not None:
            self._land(plane, write)
        return write is not None

    def quiet(self, plane: DataPlane) -> bool:
        """Revoked leases on this plane's memory whose writer has stopped become quiet."""
        quiet = [lease_id for lease_id, one in plane.expected.items() if one.revoked and self._stop_writer(lease_id)]
        for lease_id in quiet:
            del plane.expected[lease_id]
            plane.report(LeaseQuiet(lease_id))
        return bool(quiet)

    def break_transfer(self, plane: DataPlane) -> bool:
        """The connection under the oldest write of this plane is lost, as both sides notice."""
        if not plane.outgoing:
            return False
        lease_id, address = plane.outgoing[0].lease_id, plane.outgoing[0].address
        plane.drop_push(lease_id)
        plane.report(PushFailed(lease_id, "the connection was lost"))
        target = self._planes.get(address)
        if target is not None and lease_id in target.expected and not target.expected[lease_id].revoked:
            target.report(WriterLost(lease_id, "the connection was lost"))
        return True

    def _stop_writer(self, lease_id: str) -> bool:
        for plane in self._planes.values():
            if lease_id in plane.pushes:
                if plane.stalled:
                    return False
                plane.drop_push(lease_id)
                plane.report(PushFailed(lease_id, "the lease was revoked"))
        return True

    def _land(self, writer: DataPlane, write: Write) -> None:
        target = self._planes.get(write.address)
        pushing = writer.pushes[write.lease_id]
        if not pushing.joined:
            stands = target is not None and write.lease_id in target.expected
            if not stands or (target and target.expected[write.lease_id].revoked):
                writer.drop_push(write.lease_id)
                writer.report(PushFailed(write.lease_id, "there is no such lease"))
                return
            pushing.joined = True
        lease = target.expected.get(write.lease_id) if target else None
        if target is None or lease is None:
            raise CanaryDied(f"a write under lease {write.lease_id}, which nobody has given")
        if write.target not in lease.blocks:
            raise CanaryDied(f"block {write.target} was written under a lease that does not cover it")
        target.memory[write.target][:] = write.memory[write.source]
        lease.missing.discard(write.target)
        if not lease.missing:
            del writer.pushes[write.lease_id]
            size = len(lease.blocks) * len(write.memory[write.source]) * 8
            sums = [_checksum(target.memory[block]) for block in lease.blocks] if lease.checksums else []
            if not lease.revoked:
                target.report(Counted(write.lease_id, sums, size, 0.001))
            writer.report(Sent(write.lease_id, sums, size, 0.001))


def _checksum(block: "array[int]") -> int:
    return zlib.crc32(block.tobytes())

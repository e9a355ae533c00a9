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
    EndLease,
    ExpectingWrites,
    ExpectWrites,
    KvCommand,
    KvPush,
    KvReport,
    LeaseQuiesced,
    PushComplete,
    PushFailed,
    PushQuiesced,
    RevokeLease,
    StopPush,
    WriterLost,
    WritesComplete,
)

Memory = list["array[int]"]


class ForbiddenKvWrite(AssertionError):
    """A block was written by somebody who may not."""


@dataclass(slots=True)
class ExpectedLease:
    """A lease on our memory."""

    missing: set[int]
    blocks: list[int]
    checksums: bool
    revoked: bool = False


@dataclass(slots=True)
class ActivePush:
    push: KvPush
    block_ids: list[int]
    memory: Memory
    num_pushed: int = 0
    """Blocks of the request that were put on their way, or that the peer has."""
    joined: bool = False
    """The target was asked whether the lease stands. From then on it must not be forgotten without our word."""


class PendingKvWrite(NamedTuple):
    lease_id: str
    address: str
    source: int
    target: int
    memory: Memory


@dataclass(slots=True)
class SimKvTransfer:
    address: str
    memory: Memory = field(default_factory=list)
    expected_leases: dict[str, ExpectedLease] = field(default_factory=dict)
    pushes: dict[str, ActivePush] = field(default_factory=dict)
    outgoing: deque[PendingKvWrite] = field(default_factory=deque)
    reports: list[KvReport] = field(default_factory=list)
    stalled: bool = False
    """Its process is stopped: it neither writes nor answers."""
    slow_targets: set[str] = field(default_factory=set)
    """Peers to which nothing moves for now."""
    queued_commands: list[KvCommand] = field(default_factory=list)
    """Said while it was stalled."""
    stopped: set[str] = field(default_factory=set)
    """Pushes that were stopped: the command may overtake the step that opens one."""
    notify: Callable[[], None] = lambda: None
    """There is a report."""

    @property
    def is_busy(self) -> bool:
        return bool(self.outgoing) or any(lease.revoked for lease in self.expected_leases.values())

    def report(self, report: KvReport) -> None:
        self.reports.append(report)
        self.notify()

    def command(self, command: KvCommand) -> None:
        if self.stalled:
            self.queued_commands.append(command)
            return
        match command:
            case ExpectWrites():
                self.expected_leases[command.lease_id] = ExpectedLease(
                    set(command.block_ids), command.block_ids, command.checksums
                )
                self.report(ExpectingWrites(command.lease_id))
            case EndLease():
                del self.expected_leases[command.lease_id]
            case RevokeLease():
                # Quiet when the writer says so; `SimKvNetwork` asks it.
                if command.lease_id in self.expected_leases:
                    self.expected_leases[command.lease_id].revoked = True
                else:
                    self.report(LeaseQuiesced(command.lease_id))
            case StopPush():
                self.drop_push(command.lease_id)
                self.stopped.add(command.lease_id)
                self.report(PushQuiesced(command.lease_id))

    def open_push(self, push: KvPush, block_ids: list[int], memory: Memory) -> None:
        if push.lease_id not in self.stopped:
            self.pushes[push.lease_id] = ActivePush(push, block_ids, memory, push.first_block)

    def advance_push(self, lease_id: str, num_computed_blocks: int) -> None:
        """So many leading blocks of the request are final."""
        pushing = self.pushes.get(lease_id)
        if pushing is None:
            return
        for index in range(pushing.num_pushed, num_computed_blocks):
            target = pushing.push.block_ids[index - pushing.push.first_block]
            write = PendingKvWrite(
                lease_id, pushing.push.endpoint.address, pushing.block_ids[index], target, pushing.memory
            )
            self.outgoing.append(write)
        pushing.num_pushed = max(pushing.num_pushed, num_computed_blocks)

    def next_write(self) -> PendingKvWrite | None:
        """The oldest one that can move. A slow peer holds up its own only."""
        for index, write in enumerate(self.outgoing):
            if write.address not in self.slow_targets:
                del self.outgoing[index]
                return write
        return None

    def drop_push(self, lease_id: str) -> None:
        self.pushes.pop(lease_id, None)
        self.outgoing = deque(write for write in self.outgoing if write.lease_id != lease_id)


class SimKvNetwork:
    """All planes by address. Nothing moves but by `step`."""

    def __init__(self) -> None:
        self._planes: dict[str, SimKvTransfer] = {}

    def add(self, plane: SimKvTransfer) -> None:
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
                if lease_id in plane.expected_leases and not plane.expected_leases[lease_id].revoked:
                    plane.report(WriterLost(lease_id, "the writer is gone"))

    def step(self) -> bool:
        """Every plane that is not stalled moves one write; revoked leases whose writer has stopped become quiet."""
        planes = list(self._planes.values())
        moved = [self.move_one_write(plane) for plane in planes]
        return any([*moved, *(self.settle_revoked_leases(plane) for plane in planes)])

    def move_one_write(self, plane: SimKvTransfer) -> bool:
        """One write of this plane lands."""
        if plane.stalled:
            return False
        unheard, plane.queued_commands = plane.queued_commands, []
        for command in unheard:
            plane.command(command)
        write = plane.next_write()
        if write is not None:
            self._apply_write(plane, write)
        return write is not None

    def settle_revoked_leases(self, plane: SimKvTransfer) -> bool:
        """Revoked leases on this plane's memory whose writer has stopped become quiet."""
        quiet = [
            lease_id for lease_id, one in plane.expected_leases.items() if one.revoked and self._stop_writer(lease_id)
        ]
        for lease_id in quiet:
            del plane.expected_leases[lease_id]
            plane.report(LeaseQuiesced(lease_id))
        return bool(quiet)

    def break_transfer(self, plane: SimKvTransfer) -> bool:
        """The connection under the oldest write of this plane is lost, as both sides notice."""
        if not plane.outgoing:
            return False
        lease_id, address = plane.outgoing[0].lease_id, plane.outgoing[0].address
        plane.drop_push(lease_id)
        plane.report(PushFailed(lease_id, "the connection was lost"))
        target = self._planes.get(address)
        if target is not None and lease_id in target.expected_leases and not target.expected_leases[lease_id].revoked:
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

    def _apply_write(self, writer: SimKvTransfer, write: PendingKvWrite) -> None:
        target = self._planes.get(write.address)
        pushing = writer.pushes[write.lease_id]
        if not pushing.joined:
            stands = target is not None and write.lease_id in target.expected_leases
            if not stands or (target and target.expected_leases[write.lease_id].revoked):
                writer.drop_push(write.lease_id)
                writer.report(PushFailed(write.lease_id, "there is no such lease"))
                return
            pushing.joined = True
        lease = target.expected_leases.get(write.lease_id) if target else None
        if target is None or lease is None:
            raise ForbiddenKvWrite(f"a write under lease {write.lease_id}, which nobody has given")
        if write.target not in lease.blocks:
            raise ForbiddenKvWrite(f"block {write.target} was written under a lease that does not cover it")
        target.memory[write.target][:] = write.memory[write.source]
        lease.missing.discard(write.target)
        if not lease.missing:
            del writer.pushes[write.lease_id]
            size = len(lease.blocks) * len(write.memory[write.source]) * 8
            sums = [_checksum(target.memory[block]) for block in lease.blocks] if lease.checksums else []
            if not lease.revoked:
                target.report(WritesComplete(write.lease_id, sums, size, 0.001))
            writer.report(PushComplete(write.lease_id, sums, size, 0.001))


def _checksum(block: "array[int]") -> int:
    return zlib.crc32(block.tobytes())

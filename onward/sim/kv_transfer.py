"""A hash worker's KV transfer: it has the commands and reports of the real one, and its writes land only on demand.

`SimKvNetwork` moves the writes one after another. A write is either at its writer or in the target's memory, as with
shared memory. Once the target has confirmed a lease, a write under it lands whether or not the lease was revoked since.
A write to a block that no lease covers, or under a lease that was reported as quiesced, raises `ForbiddenKvWrite`.
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
    """A write to a block that the writer has no right to write."""


@dataclass(slots=True)
class ExpectedLease:
    """A lease on this worker's memory."""

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
    """Leading blocks of the request that were queued for writing, or that the peer had already."""
    joined: bool = False
    """The target has confirmed the lease. From then on the lease must not end before this writer has stopped."""
    memory_of_dead: Memory | None = None
    """Memory of a dead target whose death the writer has not noticed. The writer still has it mapped and may write
    it."""


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
    """Addresses of peers to which no write moves for now."""
    queued_commands: list[KvCommand] = field(default_factory=list)
    """Commands that came while it was stalled or had late pushes."""
    stopped: set[str] = field(default_factory=set)
    """Lease ids of stopped pushes. The command may arrive before the step that opens the push."""
    notify: Callable[[], None] = lambda: None
    """Called when there is a report."""
    notices_deaths: Callable[[], bool] = lambda: True
    """Returns whether it notices the death of a target at once. Otherwise it notices when it moves next."""

    @property
    def is_busy(self) -> bool:
        return bool(self.outgoing or self.late_pushes) or any(lease.revoked for lease in self.expected_leases.values())

    @property
    def late_pushes(self) -> list[str]:
        """Lease ids of pushes whose target has died unnoticed."""
        return [lease_id for lease_id, push in self.pushes.items() if push.memory_of_dead is not None]

    def report(self, report: KvReport) -> None:
        self.reports.append(report)
        self.notify()

    def command(self, command: KvCommand) -> None:
        if self.stalled or self.late_pushes:
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
                # `SimKvNetwork` reports it as quiesced once the writer has stopped.
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
        """Queues the writes of blocks that have become final. `num_computed_blocks` counts the final leading blocks."""
        active_push = self.pushes.get(lease_id)
        if active_push is None:
            return
        for index in range(active_push.num_pushed, num_computed_blocks):
            target = active_push.push.block_ids[index - active_push.push.first_block]
            write = PendingKvWrite(
                lease_id, active_push.push.endpoint.address, active_push.block_ids[index], target, active_push.memory
            )
            self.outgoing.append(write)
        active_push.num_pushed = max(active_push.num_pushed, num_computed_blocks)

    def next_write(self) -> PendingKvWrite | None:
        """Returns the oldest write that can move, or None. A slow peer delays only writes to itself."""
        for index, write in enumerate(self.outgoing):
            if write.address not in self.slow_targets:
                del self.outgoing[index]
                return write
        return None

    def drop_push(self, lease_id: str) -> None:
        self.pushes.pop(lease_id, None)
        self.outgoing = deque(write for write in self.outgoing if write.lease_id != lease_id)


class SimKvNetwork:
    """All transfers by address. Writes move only when a method is called."""

    def __init__(self) -> None:
        self._transfers: dict[str, SimKvTransfer] = {}

    def add(self, transfer: SimKvTransfer) -> None:
        self._transfers[transfer.address] = transfer

    def remove(self, address: str) -> None:
        """Removes the transfer of a dead process. Pushes to it fail as soon as their writers notice, and its own writes
        are lost."""
        removed = self._transfers.pop(address)
        for transfer in self._transfers.values():
            for lease_id, active_push in list(transfer.pushes.items()):
                if active_push.push.endpoint.address != address:
                    continue
                if active_push.joined and (transfer.stalled or not transfer.notices_deaths()):
                    active_push.memory_of_dead = removed.memory
                else:
                    transfer.drop_push(lease_id)
                    transfer.report(PushFailed(lease_id, "the peer is gone"))
            for lease_id in removed.pushes:
                if lease_id in transfer.expected_leases and not transfer.expected_leases[lease_id].revoked:
                    transfer.report(WriterLost(lease_id, "the writer is gone"))

    def may_be_written(self, address: str) -> bool:
        """Returns whether a writer has not noticed the death of the process at this address, and so still has its
        memory mapped."""
        return any(
            transfer.pushes[lease_id].push.endpoint.address == address
            for transfer in self._transfers.values()
            for lease_id in transfer.late_pushes
        )

    def step(self) -> bool:
        """Moves one write of every transfer that is not stalled, then settles revoked leases. Returns whether it did
        anything."""
        transfers = list(self._transfers.values())
        moved = [self.move_one_write(transfer) for transfer in transfers]
        return any([*moved, *(self.settle_revoked_leases(transfer) for transfer in transfers)])

    def move_one_write(self, transfer: SimKvTransfer) -> bool:
        """Lands one write of this transfer, or all late writes of a push. Returns whether it did anything."""
        if transfer.stalled:
            return False
        if late_pushes := transfer.late_pushes:
            self._write_late(transfer, late_pushes[0])
            return True
        queued, transfer.queued_commands = transfer.queued_commands, []
        for command in queued:
            transfer.command(command)
        write = transfer.next_write()
        if write is not None:
            self._apply_write(transfer, write)
        return write is not None

    def _write_late(self, writer: SimKvTransfer, lease_id: str) -> None:
        """Lands the pending writes of a push in the memory of its dead target, whether or not another worker uses it
        now. Then the writer notices the death."""
        active_push = writer.pushes[lease_id]
        assert active_push.memory_of_dead is not None, "the writer has it mapped"
        for write in writer.outgoing:
            if write.lease_id == lease_id:
                active_push.memory_of_dead[write.target][:] = write.memory[write.source]
        writer.drop_push(lease_id)
        writer.report(PushFailed(lease_id, "the peer is gone"))

    def settle_revoked_leases(self, transfer: SimKvTransfer) -> bool:
        """Stops the writers of revoked leases on this transfer's memory, and reports each lease as quiesced whose
        writer has stopped. Returns whether it reported any."""
        quiesced = [
            lease_id
            for lease_id, lease in transfer.expected_leases.items()
            if lease.revoked and self._stop_writer(lease_id)
        ]
        for lease_id in quiesced:
            del transfer.expected_leases[lease_id]
            transfer.report(LeaseQuiesced(lease_id))
        return bool(quiesced)

    def break_transfer(self, transfer: SimKvTransfer) -> bool:
        """Breaks the connection of the oldest write of this transfer, which both sides notice. Returns whether there
        was one."""
        if not transfer.outgoing:
            return False
        lease_id, address = transfer.outgoing[0].lease_id, transfer.outgoing[0].address
        transfer.drop_push(lease_id)
        transfer.report(PushFailed(lease_id, "the connection was lost"))
        target = self._transfers.get(address)
        if target is not None and lease_id in target.expected_leases and not target.expected_leases[lease_id].revoked:
            target.report(WriterLost(lease_id, "the connection was lost"))
        return True

    def _stop_writer(self, lease_id: str) -> bool:
        for transfer in self._transfers.values():
            if lease_id in transfer.pushes:
                if transfer.stalled:
                    return False
                transfer.drop_push(lease_id)
                transfer.report(PushFailed(lease_id, "the lease was revoked"))
        return True

    def _apply_write(self, writer: SimKvTransfer, write: PendingKvWrite) -> None:
        target = self._transfers.get(write.address)
        active_push = writer.pushes[write.lease_id]
        if not active_push.joined:
            is_leased = target is not None and write.lease_id in target.expected_leases
            if not is_leased or (target and target.expected_leases[write.lease_id].revoked):
                writer.drop_push(write.lease_id)
                writer.report(PushFailed(write.lease_id, "there is no such lease"))
                return
            active_push.joined = True
        lease = target.expected_leases.get(write.lease_id) if target else None
        if target is None or lease is None:
            raise ForbiddenKvWrite(f"a write under lease {write.lease_id}, which was never granted")
        if write.target not in lease.blocks:
            raise ForbiddenKvWrite(f"block {write.target} was written under a lease that does not cover it")
        target.memory[write.target][:] = write.memory[write.source]
        lease.missing.discard(write.target)
        if not lease.missing:
            del writer.pushes[write.lease_id]
            num_bytes = len(lease.blocks) * len(write.memory[write.source]) * 8
            checksums = [_checksum(target.memory[block]) for block in lease.blocks] if lease.checksums else []
            if not lease.revoked:
                target.report(WritesComplete(write.lease_id, checksums, num_bytes, 0.001))
            writer.report(PushComplete(write.lease_id, checksums, num_bytes, 0.001))


def _checksum(block: "array[int]") -> int:
    return zlib.crc32(block.tobytes())

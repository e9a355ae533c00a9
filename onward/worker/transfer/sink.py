"""The decode worker's side of all transfers: which leases are open, who writes under them, what has come.

It is told what the engine commands and what writers say, and answers both. A writer that was let in may write until it
has said that it stopped or its connection is over; only where the bytes come through our own hands are we sooner sure.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onward.proto.kv_transfer import (
    Counted,
    EndLease,
    Expect,
    Expecting,
    KvReport,
    LeaseQuiet,
    Revoke,
    WriterLost,
)
from onward.worker.transfer.backend import Receiver
from onward.worker.transfer.channel import BytesTaken, Channel
from onward.worker.transfer.checksums import block_checksum
from onward.worker.transfer.geometry import Geometry
from onward.worker.transfer.lease import Lease
from onward.worker.transfer.messages import Accepted, Incoming, Join, Joined, Left, Stop, Written, Wrote

STOP_S = 2.0
_MAX_ENDED = 4096
"""Leases that are remembered after their end, so that a late writer is told why it is refused."""


class RuleBroken(Exception):
    """A writer said what makes no sense, whatever happened before."""


class Sink:
    def __init__(
        self,
        memory: memoryview,
        geometry: Geometry,
        receiver: Receiver,
        *,
        is_in_band: bool,
        report: Callable[[KvReport], None],
    ) -> None:
        self._memory, self._geometry, self._receiver = memory, geometry, receiver
        self._is_in_band, self._report = is_in_band, report
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._channels: dict[int, Channel] = {}
        self._taking: dict[int, tuple[Lease | None, Incoming]] = {}
        """Of each writer: the batch whose bytes are coming, and its lease while that is good."""
        self.num_dropped = 0
        """Batches that came for a lease that was over, or for pages that were not the writer's."""

    def command(self, command: Expect | EndLease | Revoke) -> None:
        match command:
            case Expect(lease_id):
                self._expect(lease_id, command)
            case EndLease(lease_id):
                self._end(lease_id, "it has ended")
            case Revoke(lease_id):
                self._revoke(lease_id)

    def welcome(self, writer: int, channel: Channel) -> None:
        self._channels[writer] = channel

    def has_writer(self, writer: int) -> bool:
        """Whether it may write under some lease."""
        return any(lease.writer == writer for lease in self._leases.values())

    def overdue_writers(self, now_s: float) -> set[int]:
        """Those that were told to stop a while ago, and have not answered."""
        overdue: set[int] = set()
        for lease in self._leases.values():
            if lease.is_revoked and lease.writer is not None:
                lease.waits_since_s = now_s if lease.waits_since_s is None else lease.waits_since_s
                if now_s - lease.waits_since_s > STOP_S:
                    overdue.add(lease.writer)
        return overdue

    def hear(self, writer: int, message: Any, now_s: float) -> None:
        """Raises `RuleBroken` if the writer is not to be talked to any longer."""
        match message:
            case Join():
                self._join(writer, message)
            case Incoming():
                self._incoming(writer, message, now_s)
            case BytesTaken():
                self._bytes_taken(writer, now_s)
            case Wrote():
                self._wrote(writer, message, now_s)
            case Written(lease_id):
                self._written(writer, lease_id)
            case Left(lease_id):
                self._left(writer, lease_id)
            case _:
                raise RuleBroken(f"{type(message).__name__} does not belong here")

    def lose(self, writer: int, reason: str) -> None:
        """Its connection is over. What it had begun is shut out before anybody hears of it."""
        self._receiver.expel(writer)
        self._channels.pop(writer, None)
        self._taking.pop(writer, None)
        for lease in [lease for lease in self._leases.values() if lease.writer == writer]:
            lease.writer = None
            self._writer_is_quiet(lease, reason)

    def give_up(self, writer: int, reason: str) -> None:
        """It has broken the rules, and is not listened to any more; but it is not over yet."""
        self._drop_rest(writer)
        for lease in [lease for lease in self._leases.values() if lease.writer == writer]:
            self._break(lease, reason)

    def _expect(self, lease_id: str, expect: Expect) -> None:
        if lease_id in self._ended:
            self._report(LeaseQuiet(lease_id))
            return
        if lease_id not in self._leases:
            blocks = expect.block_ids
            assert not blocks or 0 <= min(blocks) <= max(blocks) < self._geometry.num_blocks, "blocks of our pool"
            self._leases[lease_id] = Lease(lease_id, blocks, expect.checksums, self._geometry)
        self._report(Expecting(lease_id))

    def _revoke(self, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.writer is None or self._is_in_band:
            self._end(lease_id, "it was revoked")
            self._report(LeaseQuiet(lease_id))
        elif not lease.is_revoked:
            lease.is_revoked = True
            self._tell(lease.writer, Stop(lease_id, "the lease was revoked"))

    def _end(self, lease_id: str, why: str) -> None:
        self._ended[lease_id] = why
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        lease = self._leases.pop(lease_id, None)
        if lease is None or lease.writer is None:
            return
        taking, _ = self._taking.get(lease.writer, (None, None))
        if taking is lease:
            self._drop_rest(lease.writer)
        self._tell(lease.writer, Stop(lease_id, why))

    def _join(self, writer: int, join: Join) -> None:
        lease = self._leases.get(join.lease_id)
        if lease is None:
            self._tell(writer, Stop(join.lease_id, self._ended.get(join.lease_id, "there is no such lease")))
        elif lease.is_broken or lease.is_counted or lease.writer not in (None, writer):
            self._tell(writer, Stop(join.lease_id, "it has, or had, another writer"))
        elif lease.block_ids != join.block_ids:
            self._tell(writer, Stop(join.lease_id, "the lease is for other blocks"))
        else:
            lease.writer = writer
            self._tell(writer, Joined(join.lease_id))

    def _incoming(self, writer: int, incoming: Incoming, now_s: float) -> None:
        """Where the bytes go is decided now; a lease that ends while they come lets no more of them in."""
        if not self._is_in_band:
            raise RuleBroken("bytes do not come on this link")
        if any(at < 0 or count <= 0 for at, count in incoming.places):
            raise RuleBroken("bytes were announced for a place that cannot be")
        lease = self._lease_of(writer, incoming.lease_id)
        if lease is not None and not self._may_write(lease, incoming.places):
            lease = None
        self._taking[writer] = lease, incoming
        if lease is None:
            self.num_dropped += 1
            self._channels[writer].drop_bytes(sum(count for _, count in incoming.places))
        else:
            lease.first_s = now_s if lease.first_s is None else lease.first_s
            self._channels[writer].take_bytes([self._memory[at : at + count] for at, count in incoming.places])

    def _bytes_taken(self, writer: int, now_s: float) -> None:
        lease, incoming = self._taking.pop(writer)
        if lease is not None:
            lease.mark(incoming.places, now_s)

    def _wrote(self, writer: int, wrote: Wrote, now_s: float) -> None:
        if self._is_in_band:
            raise RuleBroken("nothing is written here but the bytes on this link")
        lease = self._lease_of(writer, wrote.lease_id)
        if lease is not None and self._may_write(lease, wrote.places):
            lease.mark(wrote.places, now_s)

    def _drop_rest(self, writer: int) -> None:
        if writer in self._taking:
            self.num_dropped += 1
            self._taking[writer] = None, self._taking[writer][1]
            self._channels[writer].drop_rest()

    def _written(self, writer: int, lease_id: str) -> None:
        lease = self._lease_of(writer, lease_id)
        if lease is None or lease.is_revoked or lease.is_broken:
            return  # it was told to stop, and will answer that
        if not lease.is_complete:
            self._break(lease, f"its writer was done after {lease.num_arrived} of {lease.num_pages} pages")
            return
        lease.writer, lease.is_counted = None, True
        self._tell(writer, Accepted(lease_id))
        checksums = []
        if lease.checksums:
            checksums = [block_checksum(self._memory, self._geometry, block) for block in lease.block_ids]
        self._report(Counted(lease_id, checksums, lease.num_bytes, lease.seconds))

    def _left(self, writer: int, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.writer == writer:
            lease.writer = None
            self._writer_is_quiet(lease, "its writer gave up")

    def _writer_is_quiet(self, lease: Lease, reason: str) -> None:
        if lease.is_revoked:
            self._end(lease.lease_id, "it was revoked")
            self._report(LeaseQuiet(lease.lease_id))
        else:
            self._break(lease, reason)

    def _break(self, lease: Lease, reason: str) -> None:
        """Reported once. The lease stays until the engine ends it, and its writer until it is quiet."""
        if lease.writer is not None:
            self._tell(lease.writer, Stop(lease.lease_id, reason))
        if not lease.is_broken and not lease.is_revoked:
            self._report(WriterLost(lease.lease_id, reason))
        lease.is_broken = True

    def _lease_of(self, writer: int, lease_id: str) -> Lease | None:
        """None, and the writer is told, if it has not joined such a lease."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.writer == writer:
            return lease
        self._tell(writer, Stop(lease_id, self._ended.get(lease_id, "there is no such lease")))
        return None

    def _may_write(self, lease: Lease, places: list[tuple[int, int]]) -> bool:
        if lease.is_broken:
            return False
        if reason := lease.why_not(places):
            self._break(lease, reason)
            return False
        return True

    def _tell(self, writer: int, message: Accepted | Joined | Stop) -> None:
        if channel := self._channels.get(writer):
            channel.send(message)

"""The decode worker's side of all transfers: the open leases, their writers, and the pages that have arrived.

It handles the commands of the engine and the messages of writers, and answers both. A writer with an open push may
write until it has reported that it stopped, or its connection is over. Only with an in-band backend, whose bytes the
receiver itself writes, is the end of writing certain sooner.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onward.pd.transfer.backend import ReceiverBackend
from onward.pd.transfer.framed_channel import FramedChannel, PayloadReceived
from onward.pd.transfer.incoming_lease import IncomingLease
from onward.pd.transfer.page_geometry import PageGeometry, block_checksum
from onward.pd.transfer.transfer_messages import (
    AllPagesAccepted,
    AllPagesWritten,
    OpenPush,
    PagesWritten,
    PayloadHeader,
    PushOpened,
    StopWriting,
    WritingStopped,
)
from onward.proto.kv_transfer import (
    EndLease,
    ExpectingWrites,
    ExpectWrites,
    KvReport,
    LeaseQuiesced,
    RevokeLease,
    WriterLost,
    WritesComplete,
)

STOP_TIMEOUT_S = 2.0
_MAX_ENDED = 4096
"""Ended leases that are remembered, so that a late writer gets the reason why it is refused."""


class ProtocolViolation(Exception):
    """A writer has sent a message that is invalid in every state."""


class KvReceiver:
    def __init__(
        self,
        memory: memoryview,
        geometry: PageGeometry,
        backend: ReceiverBackend,
        *,
        is_in_band: bool,
        report: Callable[[KvReport], None],
    ) -> None:
        self._memory, self._geometry, self._backend = memory, geometry, backend
        self._is_in_band, self._report = is_in_band, report
        self._leases: dict[str, IncomingLease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._channels: dict[int, FramedChannel] = {}
        self._incoming_payloads: dict[int, tuple[IncomingLease | None, PayloadHeader]] = {}
        """For each writer: the batch whose bytes are arriving, and its lease, or None if the bytes are discarded."""
        self.num_discarded_batches = 0
        """Batches that came for a lease that was over, or for pages that the writer must not write."""

    def execute(self, command: ExpectWrites | EndLease | RevokeLease) -> None:
        match command:
            case ExpectWrites(lease_id):
                self._open_lease(lease_id, command)
            case EndLease(lease_id):
                self._close_lease(lease_id, "it has ended")
            case RevokeLease(lease_id):
                self._revoke(lease_id)

    def add_sender(self, sender_id: int, channel: FramedChannel) -> None:
        assert sender_id not in self._channels, "a writer has one channel"
        self._channels[sender_id] = channel

    def has_open_lease(self, sender_id: int) -> bool:
        """Returns whether the writer may write under some lease."""
        return any(lease.sender == sender_id for lease in self._leases.values())

    def overdue_senders(self, now_s: float) -> set[int]:
        """Returns the writers that were told to stop more than `STOP_TIMEOUT_S` ago, and have not answered."""
        overdue: set[int] = set()
        for lease in self._leases.values():
            if lease.is_revoked and lease.sender is not None:
                lease.revoked_s = now_s if lease.revoked_s is None else lease.revoked_s
                if now_s - lease.revoked_s > STOP_TIMEOUT_S:
                    overdue.add(lease.sender)
        return overdue

    def receive(self, sender_id: int, message: Any, now_s: float) -> None:
        """Handles a writer's message. Raises `ProtocolViolation` if no further message of this writer must be
        handled."""
        match message:
            case OpenPush():
                self._on_open_push(sender_id, message)
            case PayloadHeader():
                self._on_payload_header(sender_id, message, now_s)
            case PayloadReceived():
                self._on_payload_received(sender_id, now_s)
            case PagesWritten():
                self._on_pages_written(sender_id, message, now_s)
            case AllPagesWritten(lease_id):
                self._on_all_pages_written(sender_id, lease_id)
            case WritingStopped(lease_id):
                self._on_writing_stopped(sender_id, lease_id)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} does not belong here")

    def remove_sender(self, sender_id: int, reason: str) -> None:
        """Handles the end of a writer's connection. Shuts the writer out before the end is reported to the engine."""
        self._backend.unregister_sender(sender_id)
        self._channels.pop(sender_id, None)
        self._incoming_payloads.pop(sender_id, None)
        for lease in [lease for lease in self._leases.values() if lease.sender == sender_id]:
            lease.sender = None
            self._on_sender_quiet(lease, reason)

    def stop_listening_to(self, sender_id: int, reason: str) -> None:
        """Fails all leases of a writer that has broken the protocol. Its messages are no longer handled, but it may
        still write until its connection is over."""
        self._discard_rest(sender_id)
        for lease in [lease for lease in self._leases.values() if lease.sender == sender_id]:
            self._fail_lease(lease, reason)

    def _open_lease(self, lease_id: str, command: ExpectWrites) -> None:
        if lease_id in self._ended:
            self._report(LeaseQuiesced(lease_id))
            return
        if lease_id not in self._leases:
            blocks = command.block_ids
            assert min(blocks, default=0) >= 0, "a leased block has a number"
            assert max(blocks, default=-1) < self._geometry.num_blocks, "leased blocks are blocks of our pool"
            self._leases[lease_id] = IncomingLease(lease_id, blocks, command.checksums, self._geometry)
        self._report(ExpectingWrites(lease_id))

    def _revoke(self, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.sender is None or self._is_in_band:
            self._close_lease(lease_id, "it was revoked")
            self._report(LeaseQuiesced(lease_id))
        elif not lease.is_revoked:
            lease.is_revoked = True
            self._send(lease.sender, StopWriting(lease_id, "the lease was revoked"))

    def _close_lease(self, lease_id: str, reason: str) -> None:
        self._ended[lease_id] = reason
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        lease = self._leases.pop(lease_id, None)
        if lease is None or lease.sender is None:
            return
        current_lease, _ = self._incoming_payloads.get(lease.sender, (None, None))
        if current_lease is lease:
            self._discard_rest(lease.sender)
        self._send(lease.sender, StopWriting(lease_id, reason))

    def _on_open_push(self, sender_id: int, message: OpenPush) -> None:
        lease = self._leases.get(message.lease_id)
        if lease is None:
            self._send(
                sender_id, StopWriting(message.lease_id, self._ended.get(message.lease_id, "there is no such lease"))
            )
        elif lease.has_failed or lease.is_received or lease.sender not in (None, sender_id):
            self._send(sender_id, StopWriting(message.lease_id, "it has, or had, another writer"))
        elif lease.block_ids != message.block_ids:
            self._send(sender_id, StopWriting(message.lease_id, "the lease is for other blocks"))
        else:
            lease.sender = sender_id
            self._send(sender_id, PushOpened(message.lease_id))

    def _on_payload_header(self, sender_id: int, header: PayloadHeader, now_s: float) -> None:
        """Decides where the bytes that follow go. If their lease ends while they arrive, the rest is discarded."""
        if not self._is_in_band:
            raise ProtocolViolation("bytes do not come on this link")
        if any(offset < 0 or num_bytes <= 0 for offset, num_bytes in header.byte_ranges):
            raise ProtocolViolation("bytes were announced for a place that cannot be")
        lease = self._open_lease_of(sender_id, header.lease_id)
        if lease is not None and not self._may_write(lease, header.byte_ranges):
            lease = None
        assert sender_id not in self._incoming_payloads, "a channel delivers one batch of bytes at a time"
        self._incoming_payloads[sender_id] = lease, header
        if lease is None:
            self.num_discarded_batches += 1
            self._channels[sender_id].discard_payload(sum(num_bytes for _, num_bytes in header.byte_ranges))
        else:
            lease.first_s = now_s if lease.first_s is None else lease.first_s
            self._channels[sender_id].receive_payload_into(
                [self._memory[offset : offset + num_bytes] for offset, num_bytes in header.byte_ranges]
            )

    def _on_payload_received(self, sender_id: int, now_s: float) -> None:
        assert sender_id in self._incoming_payloads, "bytes are received for a batch that was announced"
        lease, header = self._incoming_payloads.pop(sender_id)
        if lease is not None:
            lease.mark_written(header.byte_ranges, now_s)

    def _on_pages_written(self, sender_id: int, message: PagesWritten, now_s: float) -> None:
        if self._is_in_band:
            raise ProtocolViolation("nothing is written here but the bytes on this link")
        lease = self._open_lease_of(sender_id, message.lease_id)
        if lease is not None and self._may_write(lease, message.byte_ranges):
            lease.mark_written(message.byte_ranges, now_s)

    def _discard_rest(self, sender_id: int) -> None:
        if sender_id in self._incoming_payloads:
            self.num_discarded_batches += 1
            self._incoming_payloads[sender_id] = None, self._incoming_payloads[sender_id][1]
            self._channels[sender_id].discard_rest_of_payload()

    def _on_all_pages_written(self, sender_id: int, lease_id: str) -> None:
        lease = self._open_lease_of(sender_id, lease_id)
        if lease is None or lease.is_revoked or lease.has_failed:
            return  # the writer was told to stop, and will answer that
        if not lease.is_complete:
            self._fail_lease(lease, f"its writer was done after {lease.num_arrived_pages} of {lease.num_pages} pages")
            return
        assert not lease.is_received, "a lease is received once"
        lease.sender, lease.is_received = None, True
        self._send(sender_id, AllPagesAccepted(lease_id))
        checksums = []
        if lease.checksums:
            checksums = [block_checksum(self._memory, self._geometry, block) for block in lease.block_ids]
        self._report(WritesComplete(lease_id, checksums, lease.num_bytes, lease.seconds))

    def _on_writing_stopped(self, sender_id: int, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.sender == sender_id:
            lease.sender = None
            self._on_sender_quiet(lease, "its writer gave up")

    def _on_sender_quiet(self, lease: IncomingLease, reason: str) -> None:
        assert lease.sender is None, "a quiet lease has no writer"
        if lease.is_revoked:
            self._close_lease(lease.lease_id, "it was revoked")
            self._report(LeaseQuiesced(lease.lease_id))
        else:
            self._fail_lease(lease, reason)

    def _fail_lease(self, lease: IncomingLease, reason: str) -> None:
        """Marks a lease as failed, and reports that once. The lease is kept until the engine ends it, and its writer
        until it has stopped."""
        if lease.sender is not None:
            self._send(lease.sender, StopWriting(lease.lease_id, reason))
        if not lease.has_failed and not lease.is_revoked:
            self._report(WriterLost(lease.lease_id, reason))
        lease.has_failed = True

    def _open_lease_of(self, sender_id: int, lease_id: str) -> IncomingLease | None:
        """Returns the lease, if the writer has opened a push for it. Otherwise sends `StopWriting` to the writer and
        returns None."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.sender == sender_id:
            return lease
        self._send(sender_id, StopWriting(lease_id, self._ended.get(lease_id, "there is no such lease")))
        return None

    def _may_write(self, lease: IncomingLease, byte_ranges: list[tuple[int, int]]) -> bool:
        if lease.has_failed:
            return False
        if reason := lease.write_error(byte_ranges):
            self._fail_lease(lease, reason)
            return False
        return True

    def _send(self, sender_id: int, message: AllPagesAccepted | PushOpened | StopWriting) -> None:
        if channel := self._channels.get(sender_id):
            channel.send(message)

"""One decode worker as a prefill worker deals with it: the connection, and all pushes that go over it.

A peer that is slow or dead costs only its own pushes: nothing waits for it, and when something is due from it and does
not come for a while, the connection ends and its pushes have failed.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.proto.kv_transfer import Endpoint, KvReport, PushFailed, PushQuiet, Sent
from onward.worker.transfer.backend import Writer
from onward.worker.transfer.backends import IN_BAND, open_writer
from onward.worker.transfer.channel import LinkLost
from onward.worker.transfer.geometry import Geometry
from onward.worker.transfer.link import WriterLink
from onward.worker.transfer.messages import Accepted, Incoming, Join, Joined, Left, Stop, Written, Wrote
from onward.worker.transfer.push_job import PushJob, Stage

HANDSHAKE_S = 5.0
PROGRESS_S = 5.0
"""Something is due from the peer: so long may nothing move."""
MAX_IN_FLIGHT = 4
"""Batches. Enough to keep a fast peer busy, few enough that a push is soon stopped."""


class Peer:
    def __init__(
        self,
        endpoint: Endpoint,
        link: WriterLink,
        memory: np.ndarray,
        ours: Geometry,
        *,
        report: Callable[[KvReport], None],
        now_s: float,
    ) -> None:
        self.endpoint, self.link = endpoint, link
        self.is_over = False
        self.idle_since_s = self._moved_s = self._opened_s = now_s
        self._memory, self._view, self._ours, self._report = memory, memory.data, ours, report
        self._theirs: Geometry | None = None
        self._writer: Writer | None = None
        self._jobs: dict[str, PushJob] = {}
        self._batches: deque[tuple[PushJob, list[tuple[int, int]]]] = deque()
        """Started and not complete, with their places in the peer's memory."""
        self._num_complete = 0
        self._moved = (0, 0, 0)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def can_start(self) -> bool:
        """Whether a turn would start a batch."""
        if self._writer is None or len(self._batches) >= MAX_IN_FLIGHT:
            return False
        return any(job.stage is Stage.WRITING and job.has_ready for job in self._jobs.values())

    @property
    def must_be_polled(self) -> bool:
        """Whether something happens here that no socket tells of."""
        return bool(self._batches) and self.endpoint.backend not in IN_BAND

    @property
    def is_computing(self) -> bool:
        return any(job.is_computing for job in self._jobs.values())

    def open(self, job: PushJob) -> None:
        self._jobs[job.lease_id] = job
        if self._writer is not None:
            self._join(job)

    def see_layers(self, layers_done: int) -> None:
        for job in self._jobs.values():
            job.see_layers(layers_done)

    def listen(self) -> None:
        """The socket is ready. Raises `LinkLost` or `TransferFailed`."""
        if not self.link.is_connected:
            self.link.connect()
        if self.link.is_connected:
            for message in self.link.messages():
                self._hear(message)
            self._use_invitation()
            self.link.channel.flush()

    def turn(self, now_s: float) -> None:
        """Starts and completes what can be. Raises `LinkLost` or `TransferFailed`."""
        if self._writer is not None:
            self._complete(self._writer, now_s)
            self._start(self._writer, now_s)
            self._complete(self._writer, now_s)
            self._finish()
        self._end_stopped()
        if self.link.is_connected:
            self.link.channel.flush()
        self._judge_progress(now_s)

    def end(self, reason: str) -> None:
        """The connection is over, and all pushes with it."""
        self.is_over = True
        if self._writer is not None:
            self._writer.close()  # from here on our memory is not read; theirs is shut by them, when the link is closed
        self.link.close()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            quiet = job.stage is Stage.STOPPING and job.failure is None
            self._report(PushQuiet(job.lease_id) if quiet else PushFailed(job.lease_id, job.failure or reason))

    def _hear(self, message: Any) -> None:
        match message:
            case Joined(lease_id):
                if (job := self._jobs.get(lease_id)) and job.stage is Stage.JOINING:
                    job.stage = Stage.WRITING
            case Accepted(lease_id):
                if (job := self._jobs.get(lease_id)) and job.stage is Stage.FINISHING:
                    del self._jobs[lease_id]
                    self._report(Sent(lease_id, job.checksums, job.num_bytes, job.seconds))
            case Stop(lease_id, reason):
                self._stopped_by_peer(lease_id, reason)
            case _:
                raise LinkLost(f"the peer said {type(message).__name__} in the middle of it")

    def _stopped_by_peer(self, lease_id: str, reason: str) -> None:
        job = self._jobs.get(lease_id)
        if job is None:
            self.link.channel.send(Left(lease_id))
        elif job.stage is not Stage.STOPPING:
            job.give_up(f"the peer stopped it: {reason}")

    def _use_invitation(self) -> None:
        if self._writer is not None or self.link.invitation is None:
            return
        self._theirs = Geometry(self._ours.num_layers, self.link.num_blocks, self._ours.page_bytes)
        self._writer = open_writer(self.endpoint.backend, self._memory, self.link.invitation, self.link.channel)
        for job in self._jobs.values():
            if job.stage is Stage.WAITING:
                self._join(job)

    def _join(self, job: PushJob) -> None:
        assert self._theirs is not None
        blocks = job.push.block_ids
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._theirs.num_blocks:
            job.give_up("the lease names blocks that the peer does not have")
            return
        job.stage = Stage.JOINING
        self.link.channel.send(Join(job.lease_id, blocks))

    def _start(self, writer: Writer, now_s: float) -> None:
        assert self._theirs is not None
        for job in self._jobs.values():
            while job.stage is Stage.WRITING and job.has_ready and len(self._batches) < MAX_IN_FLIGHT:
                batch = job.next_batch(self._theirs, self._view)
                places = [(copy.target_at, copy.num_bytes) for copy in batch]
                if self.endpoint.backend in IN_BAND:
                    self.link.channel.send(Incoming(job.lease_id, places))
                job.first_s = now_s if job.first_s is None else job.first_s
                job.num_in_flight += 1
                self._batches.append((job, places))
                writer.start(batch)

    def _finish(self) -> None:
        for job in self._jobs.values():
            if job.stage is Stage.WRITING and job.is_all_sent:
                job.stage = Stage.FINISHING
                self.link.channel.send(Written(job.lease_id))

    def _complete(self, writer: Writer, now_s: float) -> None:
        complete = writer.poll()
        for _ in range(complete - self._num_complete):
            job, places = self._batches.popleft()
            job.num_in_flight -= 1
            job.last_s = now_s
            if self.endpoint.backend not in IN_BAND:
                self.link.channel.send(Wrote(job.lease_id, places))
        self._num_complete = complete

    def _end_stopped(self) -> None:
        for job in [job for job in self._jobs.values() if job.stage is Stage.STOPPING and not job.num_in_flight]:
            del self._jobs[job.lease_id]
            if self._writer is not None:
                self.link.channel.send(Left(job.lease_id))
            self._report(PushQuiet(job.lease_id) if job.failure is None else PushFailed(job.lease_id, job.failure))

    def _judge_progress(self, now_s: float) -> None:
        moved = (self.link.channel.num_sent, self.link.channel.num_received, self._num_complete)
        if moved != self._moved or not self._is_due():
            self._moved, self._moved_s = moved, now_s
        elif now_s - self._moved_s > PROGRESS_S:
            raise LinkLost(f"the peer has not moved for {PROGRESS_S:g} s")
        if self._writer is None and now_s - self._opened_s > HANDSHAKE_S:
            raise LinkLost(f"the peer has not let us in within {HANDSHAKE_S:g} s")
        if self._jobs:
            self.idle_since_s = now_s

    def _is_due(self) -> bool:
        if self._writer is None or self._batches or self.link.channel.wants_to_write:
            return True
        return any(job.stage in (Stage.JOINING, Stage.FINISHING) for job in self._jobs.values())

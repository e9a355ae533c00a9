"""A prefill worker's connection to one decode worker, with all pushes over it.

A peer that is slow or dead affects only its own pushes, because nothing else waits for it. If an answer from it is due
and nothing moves for a while, the connection ends and its pushes fail.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.pd.transfer.authenticated_link import SenderLink
from onward.pd.transfer.backend import SenderBackend
from onward.pd.transfer.backend_registry import IN_BAND, open_sender_backend
from onward.pd.transfer.framed_channel import LinkClosed
from onward.pd.transfer.page_geometry import PageGeometry
from onward.pd.transfer.push_job import PushJob, PushStage
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
from onward.proto.kv_transfer import KvEndpoint, KvReport, PushComplete, PushFailed, PushQuiesced

HANDSHAKE_TIMEOUT_S = 5.0
PROGRESS_TIMEOUT_S = 5.0
"""How long nothing may move while an answer from the peer is due."""
MAX_BATCHES_IN_FLIGHT = 4
"""Enough to keep a fast peer busy, few enough that a push is soon stopped."""


class PushSession:
    def __init__(
        self,
        endpoint: KvEndpoint,
        link: SenderLink,
        memory: np.ndarray,
        ours: PageGeometry,
        *,
        report: Callable[[KvReport], None],
        now_s: float,
    ) -> None:
        self.endpoint, self.link = endpoint, link
        self.is_closed = False
        self.idle_since_s = self._moved_s = self._opened_s = now_s
        self._memory, self._view, self._ours, self._report = memory, memory.data, ours, report
        self._theirs: PageGeometry | None = None
        self._backend: SenderBackend | None = None
        self._jobs: dict[str, PushJob] = {}
        self._batches: deque[tuple[PushJob, list[tuple[int, int]]]] = deque()
        """Batches that are started and not complete, with their ranges in the peer's memory."""
        self._num_complete = 0
        self._moved = (0, 0, 0)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def can_start(self) -> bool:
        """Whether `run_once` would start a batch."""
        if self._backend is None or len(self._batches) >= MAX_BATCHES_IN_FLIGHT:
            return False
        return any(job.stage is PushStage.WRITING and job.has_ready for job in self._jobs.values())

    @property
    def must_be_polled(self) -> bool:
        """Whether batches are in flight whose progress no socket signals."""
        return bool(self._batches) and self.endpoint.backend not in IN_BAND

    @property
    def is_computing(self) -> bool:
        return any(job.is_computing for job in self._jobs.values())

    def open_push(self, job: PushJob) -> None:
        assert not self.is_closed, "a push goes over an open session"
        assert job.lease_id not in self._jobs, "a lease has one push at a time"
        self._jobs[job.lease_id] = job
        if self._backend is not None:
            self._send_open_push(job)

    def on_layers_done(self, layers_done: int) -> None:
        for job in self._jobs.values():
            job.on_layers_done(layers_done)

    def on_socket_ready(self) -> None:
        """Connects the link if it is not connected yet, then handles its messages and sends queued ones. Raises
        `LinkClosed` or `TransferFailed`."""
        if not self.link.is_connected:
            self.link.connect()
        if self.link.is_connected:
            for message in self.link.messages():
                self._receive(message)
            self._open_backend()
            self.link.channel.flush()

    def run_once(self, now_s: float) -> None:
        """Starts and completes batches and pushes, as far as possible. Raises `LinkClosed` or `TransferFailed`."""
        if self._backend is not None:
            self._complete_batches(self._backend, now_s)
            self._start_batches(self._backend, now_s)
            self._complete_batches(self._backend, now_s)
            self._finish_pushes()
        self._end_stopped()
        if self.link.is_connected:
            self.link.channel.flush()
        self._check_progress(now_s)

    def close(self, reason: str) -> None:
        """Closes the connection and ends all its pushes."""
        assert not self.is_closed, "a session is closed once"
        self.is_closed = True
        if self._backend is not None:
            self._backend.close()  # our memory is not read any more; the peer protects its own when the link is closed
        self.link.close()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            quiet = job.stage is PushStage.STOPPING and job.failure is None
            self._report(PushQuiesced(job.lease_id) if quiet else PushFailed(job.lease_id, job.failure or reason))

    def _receive(self, message: Any) -> None:
        match message:
            case PushOpened(lease_id):
                if (job := self._jobs.get(lease_id)) and job.stage is PushStage.JOINING:
                    job.stage = PushStage.WRITING
            case AllPagesAccepted(lease_id):
                if (job := self._jobs.get(lease_id)) and job.stage is PushStage.FINISHING:
                    assert job.num_in_flight == 0, "a push that finishes has no batch in flight"
                    del self._jobs[lease_id]
                    self._report(PushComplete(lease_id, job.checksums, job.num_bytes, job.seconds))
            case StopWriting(lease_id, reason):
                self._stopped_by_peer(lease_id, reason)
            case _:
                raise LinkClosed(f"the peer said {type(message).__name__} in the middle of it")

    def _stopped_by_peer(self, lease_id: str, reason: str) -> None:
        job = self._jobs.get(lease_id)
        if job is None:
            self.link.channel.send(WritingStopped(lease_id))
        elif job.stage is not PushStage.STOPPING:
            job.stop(f"the peer stopped it: {reason}")

    def _open_backend(self) -> None:
        if self._backend is not None or self.link.remote_memory is None:
            return
        self._theirs = PageGeometry(self._ours.num_layers, self.link.num_blocks, self._ours.page_bytes)
        self._backend = open_sender_backend(
            self.endpoint.backend, self._memory, self.link.take_remote_memory(), self.link.channel
        )
        for job in self._jobs.values():
            if job.stage is PushStage.WAITING:
                self._send_open_push(job)

    def _send_open_push(self, job: PushJob) -> None:
        assert self._theirs is not None, "the peer's pool is known when a push is opened"
        assert job.stage is PushStage.WAITING, "a push is opened once"
        blocks = job.push.block_ids
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._theirs.num_blocks:
            job.stop("the lease names blocks that the peer does not have")
            return
        job.stage = PushStage.JOINING
        self.link.channel.send(OpenPush(job.lease_id, blocks))

    def _start_batches(self, backend: SenderBackend, now_s: float) -> None:
        assert self._theirs is not None, "the peer's pool is known when batches are started"
        for job in self._jobs.values():
            while job.stage is PushStage.WRITING and job.has_ready and len(self._batches) < MAX_BATCHES_IN_FLIGHT:
                batch = job.next_batch(self._theirs, self._view)
                assert batch, "a push with ready pages has a next batch"
                byte_ranges = [(copy.target_offset, copy.num_bytes) for copy in batch]
                if self.endpoint.backend in IN_BAND:
                    self.link.channel.send(PayloadHeader(job.lease_id, byte_ranges))
                job.first_s = now_s if job.first_s is None else job.first_s
                job.num_in_flight += 1
                self._batches.append((job, byte_ranges))
                backend.start(batch)

    def _finish_pushes(self) -> None:
        for job in self._jobs.values():
            if job.stage is PushStage.WRITING and job.is_all_sent:
                assert not job.has_ready, "a push that is all sent has no ready pages"
                job.stage = PushStage.FINISHING
                self.link.channel.send(AllPagesWritten(job.lease_id))

    def _complete_batches(self, backend: SenderBackend, now_s: float) -> None:
        complete = backend.poll()
        assert complete >= self._num_complete, "the number of complete batches only grows"
        assert complete - self._num_complete <= len(self._batches), "only batches that were started complete"
        for _ in range(complete - self._num_complete):
            job, byte_ranges = self._batches.popleft()
            assert job.num_in_flight > 0, "a batch that completes counts as in flight"
            job.num_in_flight -= 1
            job.last_s = now_s
            if self.endpoint.backend not in IN_BAND:
                self.link.channel.send(PagesWritten(job.lease_id, byte_ranges))
        self._num_complete = complete

    def _end_stopped(self) -> None:
        for job in [job for job in self._jobs.values() if job.stage is PushStage.STOPPING and not job.num_in_flight]:
            del self._jobs[job.lease_id]
            if self._backend is not None:
                self.link.channel.send(WritingStopped(job.lease_id))
            self._report(PushQuiesced(job.lease_id) if job.failure is None else PushFailed(job.lease_id, job.failure))

    def _check_progress(self, now_s: float) -> None:
        moved = (self.link.channel.num_bytes_sent, self.link.channel.num_bytes_received, self._num_complete)
        if moved != self._moved or not self._awaits_peer():
            self._moved, self._moved_s = moved, now_s
        elif now_s - self._moved_s > PROGRESS_TIMEOUT_S:
            raise LinkClosed(f"the peer has not moved for {PROGRESS_TIMEOUT_S:g} s")
        if self._backend is None and now_s - self._opened_s > HANDSHAKE_TIMEOUT_S:
            raise LinkClosed(f"the peer has not let us in within {HANDSHAKE_TIMEOUT_S:g} s")
        if self._jobs:
            self.idle_since_s = now_s

    def _awaits_peer(self) -> bool:
        if self._backend is None or self._batches or self.link.channel.wants_to_write:
            return True
        return any(job.stage in (PushStage.JOINING, PushStage.FINISHING) for job in self._jobs.values())

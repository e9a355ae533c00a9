"""Leases on our blocks: one record for each, with its state and its times."""

import pytest

from onward.config import EngineConfig
from onward.engine.admission import EngineLimits, create_request
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.peer_write_leases import (
    MAX_QUARANTINE_S,
    REVOKE_GRACE_S,
    LeaseState,
    PeerWriteLease,
    PeerWriteLeases,
)
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator
from onward.proto.engine import Submit
from onward.proto.kv_transfer import EndLease, ExpectingWrites, ExpectWrites, LeaseQuiesced, RevokeLease
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello

NUM_BLOCKS, BLOCK_SIZE = 64, 16
WORKER = WorkerHello(1, "w", "e", 1, "f", NUM_BLOCKS, BLOCK_SIZE, max_model_len=4096, vocab_size=320)


class Leases(PeerWriteLeases):
    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        super().__init__(SlotAndBlockAllocator(EngineConfig(max_num_seqs=8), self.pool), "d", checksums=True)

    def lease(self, request: Request) -> PeerWriteLease:
        assert self.grant(request)
        lease = self.of(request)
        assert lease is not None
        return lease

    def opened(self, request: Request) -> PeerWriteLease:
        lease = self.lease(request)
        assert self.take_commands(1.0) == [ExpectWrites(lease.lease_id, lease.block_ids, True)]
        assert self.on_report(ExpectingWrites(lease.lease_id)) is lease
        return lease


@pytest.fixture
def leases() -> Leases:
    return Leases()


def asked(name: str = "r", num_tokens: int = 100) -> Request:
    submit = Submit(0, name, 1, [ord(name[0])] * num_tokens, SamplingParams(seed=0, max_tokens=8))
    request = create_request(submit, "api", EngineLimits(WORKER, num_drafts=0), 0.0)
    request.set_status(RequestStatus.ASKED)
    return request


def test_a_lease_opens_when_the_worker_has_confirmed_it_and_ends_with_its_kv(leases: Leases) -> None:
    lease = leases.lease(asked())
    assert lease.state is LeaseState.OPENING
    assert leases.worker_due_since_s is None, "it has not been told yet"
    leases.take_commands(5.0)
    assert leases.worker_due_since_s == 5.0
    leases.on_report(ExpectingWrites(lease.lease_id))
    assert (lease.state, leases.worker_due_since_s) == (LeaseState.OPEN, None)
    leases.on_peer_done(lease.request, 7.0)
    leases.on_peer_done(lease.request, 8.0)
    assert leases.worker_due_since_s == 7.0
    leases.complete(lease, 9.0)
    assert leases.take_commands(9.0) == [EndLease(lease.lease_id)]
    assert (leases.idle, leases.worker_due_since_s, lease.request.status) == (True, None, RequestStatus.RUNNING)


def test_a_lease_that_is_revoked_before_the_worker_was_told_is_only_revoked(leases: Leases) -> None:
    lease = leases.lease(asked())
    leases.revoke(lease.request)
    assert leases.take_commands(1.0) == [RevokeLease(lease.lease_id)]


def test_a_worker_that_never_confirmed_a_lease_owes_its_report_also_when_the_lease_is_revoked(leases: Leases) -> None:
    lease = leases.lease(asked())
    leases.take_commands(1.0)
    leases.revoke(lease.request)
    assert leases.worker_due_since_s == 1.0
    assert leases.on_report(ExpectingWrites(lease.lease_id)) is None
    assert (lease.state, leases.worker_due_since_s) == (LeaseState.REVOKED, None)


def test_revoked_blocks_are_quarantined_until_the_worker_says_that_nothing_is_written(leases: Leases) -> None:
    lease = leases.opened(asked())
    leases.revoke(lease.request)
    leases.take_commands(2.0)
    assert leases.count_by_state() == {"granted": 0, "quarantined": 1}
    assert leases.pool.num_quarantined == leases.num_returning_blocks == 7
    leases.take_commands(2.0 + REVOKE_GRACE_S + 0.1)
    assert leases.num_returning_blocks == 0, "nothing waits for them any more"
    assert leases.on_report(LeaseQuiesced(lease.lease_id)) is None
    assert (leases.idle, leases.pool.num_quarantined) == (True, 0)


def test_the_worker_is_replaced_for_a_long_quarantine_or_a_large_one(leases: Leases) -> None:
    small = leases.opened(asked())
    leases.revoke(small.request)
    leases.take_commands(2.0)
    assert leases.worker_replacement_reason(2.0 + MAX_QUARANTINE_S) is None
    assert "has not answered" in (leases.worker_replacement_reason(2.1 + MAX_QUARANTINE_S) or "")
    large = leases.lease(asked("large", 300))
    leases.revoke(large.request)
    leases.take_commands(3.0)
    assert "26 of 64 KV blocks are quarantined" in (leases.worker_replacement_reason(3.1) or "")


def test_an_abandoned_request_is_reported_once_and_its_lease_is_revoked(leases: Leases) -> None:
    lease, waiting = leases.opened(asked()), asked("w")
    leases.request_blocks(waiting, at_once=False)
    leases.abandon(lease.request)
    leases.abandon(waiting)
    assert lease.state is LeaseState.REVOKED
    assert leases.first_short_of_blocks is None and not leases.awaiting_blocks
    assert leases.take_abandoned() == [lease.request, waiting]
    assert leases.take_abandoned() == []

"""Checks what must hold in an engine's state between any two events, whatever happened before."""

from collections import Counter

from onward.engine.core import EngineCore
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.scheduling_policy import queue_key
from onward.obs.metrics import Gauge
from onward.proto.step import StepPlan


def audit_engine(core: EngineCore) -> None:
    live = list(core._live.values())
    _check_states(core, live)
    _check_blocks(core, live)
    _check_slots(core, live)
    _check_progress(core, live)
    _check_gauges(core, live)


def _check_states(core: EngineCore, live: list[Request]) -> None:
    """Checks that each request is in exactly the collection that its status names."""
    scheduler = core.scheduler
    expected_members = {
        RequestStatus.WAITING: list(scheduler.waiting),
        RequestStatus.RUNNING: list(scheduler.running),
        RequestStatus.PREEMPTING: list(scheduler.preempting),
        RequestStatus.GRANTED: list(scheduler.allocator.awaiting_kv),
        RequestStatus.OFFERED: scheduler.outgoing_handoffs.offered,
    }
    if (remote := core._handoffs._remote) is not None:
        expected_members[RequestStatus.ASKED] = [
            task.request for task in remote.tasks if task.request.status is RequestStatus.ASKED
        ]
    by_status: dict[RequestStatus, set[Request]] = {status: set() for status in RequestStatus}
    for request in live:
        by_status[request.status].add(request)
    for status, members in expected_members.items():
        assert len(set(members)) == len(members), f"no request is {status} twice"
        assert set(members) == by_status[status], status
    assert all(core._live[r.request_id] is r for r in live)
    for queue in (scheduler.waiting, scheduler.running, scheduler.allocator.awaiting_kv):
        assert queue.num_prompt_tokens == sum(r.num_prompt for r in queue), "a queue knows its tokens"
    assert scheduler.suspects <= set(live)
    seated = {r.slot_epoch: r for r in live if r.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTING)}
    assert scheduler.allocator.by_slot_epoch == seated, (
        "an epoch leads to the request that runs under it, and to no other"
    )


def _check_blocks(core: EngineCore, live: list[Request]) -> None:
    pool = core.scheduler.pool
    holders: Counter[int] = Counter()
    for request in live:
        assert len(set(request.held_block_ids)) == len(request.held_block_ids), "no block is twice in one table"
        holders.update(request.held_block_ids)
    holders.update(pool._sending)
    assert pool._ref_counts == [holders[block] for block in range(pool.num_blocks)]
    free, cached, fenced = set(pool._free), set(pool._cached), set(pool._fenced)
    assert len(free) == len(pool._free), "no block is free twice"
    quarantined = pool._quarantined
    total = len(free) + len(cached) + len(fenced) + len(quarantined) + len(holders)
    assert total == pool.num_blocks, "the counts add up"
    assert len(free | cached | fenced | quarantined | set(holders)) == pool.num_blocks, "no block is in two states"
    leases = core.scheduler.leases
    assert all((leases.of(r) is not None) == (r.status is RequestStatus.GRANTED) for r in live), (
        "only they have a lease"
    )
    leased = {block for r in live if (lease := leases.of(r)) is not None for block in lease.block_ids}
    assert pool._leased == leased, "what a peer may write is under a lease"
    assert quarantined == {block for lease in leases.revoked for block in lease.block_ids}
    assert sum(pool.count_by_state().values()) == pool.num_blocks
    assert pool._by_hash == {name: block for block, name in enumerate(pool._block_hash) if name is not None}
    assert all(pool._block_hash[block] is None for block in free)
    assert all(pool._block_hash[block] is not None for block in cached)
    due = core.scheduler.steps_in_flight
    assert all(due and due[0].step <= fence <= due[-1].step for fence in pool._fenced.values()), "a fence passes"
    for request in live:
        _check_shares(core, request, holders)


def _check_shares(core: EngineCore, request: Request, holders: Counter[int]) -> None:
    """Checks that a block with a hash holds the tokens of that hash, and that only such a block has several holders."""
    pool = core.scheduler.pool
    names = request.compute_block_hashes(pool.block_size, len(request.token_ids) // pool.block_size)
    for index, block in enumerate(request.held_block_ids, request.num_freed_blocks):
        name = pool._block_hash[block]
        if name is not None:
            assert name == names[index], "a name stands for this history at this place"
            assert (index + 1) * pool.block_size <= request.num_computed, "a block is named once it is computed"
        else:
            assert holders[block] == 1 + pool._sending[block], "what has no name belongs to one"


def _check_slots(core: EngineCore, live: list[Request]) -> None:
    slots = core.scheduler.slots
    owned = [r.slot for r in live if r.slot is not None]
    everywhere = [*owned, *slots._free, *slots._fenced]
    assert sorted(everywhere) == list(range(core.config.max_num_seqs)), "each slot is in one place"
    with_slot = (RequestStatus.RUNNING, RequestStatus.PREEMPTING, RequestStatus.GRANTED, RequestStatus.OFFERED)
    assert all((r.slot is not None) == (r.status in with_slot) for r in live)


def _check_progress(core: EngineCore, live: list[Request]) -> None:
    size = core.scheduler.pool.block_size
    under_way = {step.step for step in core.scheduler.steps_in_flight}
    for r in live:
        assert r.num_hashed_blocks * size <= r.num_computed <= r.planned_computed <= r.planned_len
        assert r.slot is None or len(r.block_ids) * size >= r.planned_computed, "what is planned has room"
        assert r.num_generated <= r.max_output_tokens
        steps = [run.step for run in r.planned_runs]
        assert under_way.issuperset(steps)
        assert steps == sorted(steps)


def _check_gauges(core: EngineCore, live: list[Request]) -> None:
    counted = Counter(r.status.value for r in live)
    assert _gauge(core, "onward_requests") == {
        s.value: counted[s.value] for s in RequestStatus if s is not RequestStatus.FINISHED
    }
    pool = core.scheduler.pool
    held = {block for r in live for block in r.held_block_ids} - pool._leased - set(pool._sending)
    shown = _gauge(core, "onward_kv_blocks")
    assert shown["owned"] == len(held)
    assert shown["leased"] == len(pool._leased)
    assert shown["sending"] == len(pool._sending)


def _gauge(core: EngineCore, name: str) -> dict[str, float]:
    # Not read from a snapshot: this runs between any two events, and making snapshots took a third of the time.
    gauge = core.registry._metrics[name]
    assert isinstance(gauge, Gauge)
    return {state: value for (state,), value in gauge._read().items()}


def find_useless_preemption(core: EngineCore, plan: StepPlan) -> Request | None:
    """Returns a request that this plan preempts although no request before it gets enough blocks by that, or None. It
    counts the blocks that requests hold and does not rely on the engine's plan.

    The number of needed blocks is a lower bound: blocks for running requests to grow into are not counted, and each
    block that may be shared counts as shared. So a preemption that this check rejects cannot have helped, whatever the
    engine has counted.
    """
    if not plan.preempt:
        return None
    victims = [request for request in core.scheduler.preempting if request.slot_epoch in _preempted(plan)]
    needers = [request for request in core._live.values() if _may_get_blocks(plan, request)]
    helped = [request for request in needers if _blocks_needed(core, request) <= _blocks_within_reach(core, request)]
    return next(
        (
            other_request
            for other_request in victims
            if not any(_comes_before(needer, other_request) for needer in helped)
        ),
        None,
    )


def _preempted(plan: StepPlan) -> set[int]:
    return {preempt.slot_epoch for preempt in plan.preempt}


def _may_get_blocks(plan: StepPlan, request: Request) -> bool:
    """Returns whether the request waits in the queue, waits for a peer without blocks, or runs and is not in this
    step."""
    if request.status is RequestStatus.RUNNING:
        return request.slot_epoch not in {run.slot_epoch for run in plan.run}
    return request.status in (RequestStatus.WAITING, RequestStatus.ASKED)


def _comes_before(needer: Request, victim: Request) -> bool:
    if needer.status is RequestStatus.RUNNING:
        return queue_key(needer) < queue_key(victim)
    return needer.priority < victim.priority


def _blocks_needed(core: EngineCore, request: Request) -> int:
    """Returns the blocks for all tokens of a request to admit, or one block more than a running request holds."""
    if request.status is RequestStatus.RUNNING:
        return len(request.held_block_ids) + 1
    return core.scheduler.pool.num_blocks_for(len(request.token_ids))


def _blocks_within_reach(core: EngineCore, request: Request) -> int:
    """Returns the number of all blocks except those that other requests keep and this one cannot share."""
    pool = core.scheduler.pool
    names = request.compute_block_hashes(pool.block_size, len(request.token_ids) // pool.block_size)
    shared = {*pool.find_cached([name for name in names if name in pool.cached_hashes]), *request.held_block_ids}
    others = [r for r in core._live.values() if r is not request and r.status is not RequestStatus.PREEMPTING]
    return pool.num_blocks - len({block for other in others for block in other.held_block_ids} - shared)

"""Whether a preemption makes room: counted from outside, from the blocks that requests hold, not from the engine's plan.

A lower bound of what is needed: blocks for running requests to grow into are not counted, and each block that may be shared
counts as shared. So a preemption that this check rejects cannot have helped, whatever the engine has counted.
"""

from onward.engine.core import EngineCore
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.scheduling_policy import queue_key
from onward.proto.step import StepPlan


def find_useless_preemption(core: EngineCore, plan: StepPlan) -> Request | None:
    """A request that this plan preempts although no request before it gets enough blocks by that."""
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
    """A request in the queue, one that has no blocks yet because a peer computes it, or one that this step leaves out."""
    if request.status is RequestStatus.RUNNING:
        return request.slot_epoch not in {run.slot_epoch for run in plan.run}
    return request.status in (RequestStatus.WAITING, RequestStatus.ASKED)


def _comes_before(needer: Request, victim: Request) -> bool:
    if needer.status is RequestStatus.RUNNING:
        return queue_key(needer) < queue_key(victim)
    return needer.priority < victim.priority


def _blocks_needed(core: EngineCore, request: Request) -> int:
    """The whole list of a request that is admitted, one more block for one that runs."""
    if request.status is RequestStatus.RUNNING:
        return len(request.block_ids) + 1
    return core.scheduler.pool.num_blocks_for(len(request.token_ids))


def _blocks_within_reach(core: EngineCore, request: Request) -> int:
    """All blocks but those that other requests keep and this one cannot share."""
    pool = core.scheduler.pool
    names = request.compute_block_hashes(pool.block_size, len(request.token_ids) // pool.block_size)
    shared = {*pool.find_cached([name for name in names if name in pool.cached_hashes]), *request.block_ids}
    others = [r for r in core._live.values() if r is not request and r.status is not RequestStatus.PREEMPTING]
    return pool.num_blocks - len({block for other in others for block in other.block_ids} - shared)

"""The engine as a person sees it at one moment. Reads state and changes nothing.

A snapshot costs the engine's loop well below a millisecond: it samples large pools, and lists a bounded number of
requests.
"""

from collections.abc import Collection, Iterable
from itertools import islice

from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.scheduler import Scheduler
from onward.proto.live import (
    BLOCK_STATES,
    MAX_BLOCK_CELLS,
    MAX_LIVE_REQUESTS,
    MAX_SHOWN_LABEL,
    LiveEngine,
    LiveRequest,
    LiveState,
)

_STATES: dict[RequestStatus, LiveState] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.ASKED: "waiting_for_kv",
    RequestStatus.GRANTED: "waiting_for_kv",
    RequestStatus.OFFERED: "offered",
    RequestStatus.PREEMPTING: "preempting",
}


def live_engine(
    scheduler: Scheduler,
    live: Collection[Request],
    now_s: float,
    *,
    step: int,
    worker_ready: bool,
    num_generated_tokens: int,
    num_preemptions: int,
) -> LiveEngine:
    pool = scheduler.pool
    block_map, blocks_per_cell = map_blocks(pool)
    return LiveEngine(
        step=step,
        worker_ready=worker_ready,
        num_slots=scheduler.config.max_num_seqs,
        block_size=pool.block_size,
        kv_blocks=pool.count_by_state(),
        block_map=block_map,
        blocks_per_cell=blocks_per_cell,
        num_requests=len(live),
        num_waiting=len(scheduler.waiting),
        num_generated_tokens=num_generated_tokens,
        num_preemptions=num_preemptions,
        requests=[_live_request(request, now_s) for request in _listed_requests(scheduler, live)],
    )


def map_blocks(pool: BlockPool) -> tuple[str, int]:
    """Returns one character for each sampled block, and the number of blocks that a character stands for."""
    blocks_per_cell = -(-pool.num_blocks // MAX_BLOCK_CELLS)
    sampled = range(0, pool.num_blocks, blocks_per_cell)
    return "".join([BLOCK_STATES[pool.state_of(block)] for block in sampled]), blocks_per_cell


def _listed_requests(scheduler: Scheduler, live: Collection[Request]) -> Iterable[Request]:
    """Returns all live requests if there are at most MAX_LIVE_REQUESTS. Otherwise returns at most that many: the
    requests with a slot first, then the head of the queue."""
    if len(live) <= MAX_LIVE_REQUESTS:
        return live
    with_slot = [*scheduler.running, *scheduler.preempting]
    return islice((*with_slot, *islice(scheduler.waiting, MAX_LIVE_REQUESTS)), MAX_LIVE_REQUESTS)


def _live_request(request: Request, now_s: float) -> LiveRequest:
    first_token_s = request.first_token_s
    return LiveRequest(
        id=request.external_id,
        state=_state_of(request),
        label=request.spec.client_request_id[:MAX_SHOWN_LABEL],
        caller=request.spec.caller,
        slot=request.slot,
        epoch=request.epoch,
        num_prompt_tokens=request.num_prompt,
        num_computed_tokens=request.num_computed,
        num_generated_tokens=request.num_generated,
        num_blocks=len(request.held_block_ids),
        num_preemptions=request.num_preemptions,
        age_s=max(0.0, now_s - request.arrival_s),
        first_token_s=None if first_token_s is None else max(0.0, first_token_s - request.arrival_s),
        trace_id=request.spec.trace_id,
    )


def _state_of(request: Request) -> LiveState:
    """Returns the state that the live view shows. A running request that has not caught up with its tokens is
    prefilling: it computes its prompt, or recomputes its KV after a preemption."""
    if request.status is not RequestStatus.RUNNING:
        return _STATES[request.status]
    return "decoding" if request.num_computed >= len(request.token_ids) - 1 and request.num_generated else "prefilling"

"""The scheduler's decisions as pure functions: order, admission, preemption, drafts, peers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.request import DraftAcceptance, Request
from onward.engine.scheduling.block_pool import ReclaimEstimate
from onward.proto.engine import CRASHES_TO_ISOLATE

QueueKey = tuple[int, float, int, str]

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of the Retry-After that a client gets when the queue is full."""

MAX_WAIT_CREDIT_S = 300.0
"""How much earlier than it came to this engine a request can count as arrived, for the time it has waited before."""

MAX_CRASH_CHARGES = 3


def queue_key(request: Request) -> QueueKey:
    """Returns the key by which the queue is sorted; the smallest is served first. Priority comes first, then arrival by
    this engine's clock, then the order of arrival within one turn. `Scheduler._admit_waiting` describes when a request
    with a larger key may overtake."""
    return request.priority, request.arrival_s, request.arrival_number, request.request_id


def credited_arrival_s(now_s: float, waited_s: float) -> float:
    """Returns the arrival time of a request that arrives now, with credit for its wait elsewhere, at most
    MAX_WAIT_CREDIT_S. The sender gives a duration, never a time, so no sender's clock decides which request is served
    first."""
    return now_s - max(0.0, min(waited_s, MAX_WAIT_CREDIT_S))


def retry_after_s(excess: float, per_s: float | None) -> float:
    """Returns the seconds after which a refused client should retry: the time to work off `excess` at the recent rate
    `per_s`, within bounds. Without a known rate, returns the lower bound."""
    return max(MIN_RETRY_S, min(MAX_RETRY_S, excess / per_s)) if per_s else MIN_RETRY_S


def chunk_size(num_to_plan: int, budget: int) -> int:
    return min(num_to_plan, budget)


def may_admit(blocks_needed: int, blocks_available: int, num_running: int) -> bool:
    """Returns whether there are blocks for the whole token list and one more for each running request to grow into. A
    request admitted without that reserve would be preempted at once."""
    return blocks_needed + num_running <= blocks_available


def may_offer(tokens_ahead: int, tokens_per_step: int) -> bool:
    """Returns whether a prompt may be offered to its decode peer: at most one step's tokens are ahead of it. Offered
    earlier, it would hold the peer's blocks unused; offered later, it would wait for them."""
    return tokens_ahead <= tokens_per_step


def should_prefill_locally(request: Request, num_uncached: int, config: EngineConfig) -> bool:
    """Returns whether a decode instance computes this prompt itself, without asking a peer. Embeddings are always
    computed here, because they leave nothing to hand over. Otherwise `local_prefill` must allow it. Then the prompt is
    computed here if few of its tokens are uncached, if this was decided before, or if the request was preempted."""
    if request.spec.sampling_params.pooling is not None:
        return True
    if not config.local_prefill:
        return False
    return request.prefill_locally or request.num_preemptions > 0 or num_uncached <= config.local_prefill_tokens


def should_reschedule(request: Request) -> bool:
    """Returns whether a preempted request should move to another instance. On an instance that computes no prompts it
    would need a peer's help to come back; a routed request can move instead."""
    return request.spec.is_routed and request.num_preemptions > 0


STEP_OVERHEAD_ROWS = 4.0
"""Fixed cost of a step, expressed in rows. Measured on two cores: a step takes about (4 + rows) ms."""
PROBE_INTERVAL_TOKENS = 16
"""Tokens without a draft after which drafting is tried again, whatever the outcome of the last drafts. More in a fuller
step, where drafts gain less."""
PROBE_DRAFTS = 2


@dataclass(slots=True)
class StepLoad:
    """Load of a step that is being planned."""

    num_rows: int
    """Without drafts."""
    num_draft_rows_left: int
    """Rows of the step that drafts may still take. The scheduler subtracts the drafts of each request that it plans."""
    draft_cost: float = 0.0
    """Cost of one more draft token for every request, as a fraction of the step's duration."""


def choose_num_drafts(limit: int, acceptance: DraftAcceptance, load: StepLoad, num_given: int = 0) -> int:
    """Returns how many tokens a request drafts in this step, at most `limit`. Drafting is turned off where it does
    not pay: then 0 is returned, and now and then a few drafts are tried. If a peer has sent drafts (`num_given`),
    these are verified instead of new ones, so drafting costs nothing.

    In units of a row's time, a step of n rows takes STEP_OVERHEAD_ROWS + n and gives n tokens. One more draft takes the
    time of its row and of its drafting. It gives a token if it and all drafts before it are accepted. A draft is worth
    its time if it gives more tokens for that time than the step does: nearly always for a request that runs alone, and
    never in a full step. A draft model proposes for all n requests in one pass, whose time is a fraction of the step's
    time, so each draft is charged that fraction of a token's time.
    """
    limit = min(limit, load.num_draft_rows_left, num_given or limit)
    worth = load.num_rows / (load.num_rows + STEP_OVERHEAD_ROWS) + (0.0 if num_given else load.draft_cost)
    count, probability = 0, acceptance.acceptance_rate
    while count < limit and probability > worth:
        count += 1
        probability *= acceptance.acceptance_rate
    if not count and worth < 1 and acceptance.tokens_since_draft * (1 - worth) >= PROBE_INTERVAL_TOKENS:
        return min(PROBE_DRAFTS, limit)
    return count


@dataclass(frozen=True, slots=True)
class PrefillPeerCandidate:
    address: str
    num_in_flight: int
    num_attempts: int
    """Attempts of the request in question at this peer."""
    available: bool
    """False for a while after it has failed."""


MAX_ATTEMPTS_PER_PEER = 3
"""Where a prompt may not be computed here; else each peer is tried once."""


def choose_prefill_peer(peers: Sequence[PrefillPeerCandidate], *, may_fall_back: bool) -> PrefillPeerCandidate | None:
    """Returns the available peer with the fewest attempts of this request, then the fewest handoffs in flight. Returns
    None if no peer is available that has attempts left."""
    limit = 1 if may_fall_back else MAX_ATTEMPTS_PER_PEER
    candidates = [peer for peer in peers if peer.available and peer.num_attempts < limit]
    return min(candidates, key=lambda peer: (peer.num_attempts, peer.num_in_flight), default=None)


def can_retry_later(peers: Sequence[PrefillPeerCandidate]) -> bool:
    """Returns whether a peer that is unavailable now may still be asked later. Applies only if the prompt may not be
    computed here."""
    return any(peer.num_attempts < MAX_ATTEMPTS_PER_PEER for peer in peers)


@dataclass(frozen=True, slots=True)
class CapacityShortage:
    """What a request needs to continue."""

    blocks: int
    num_growth_blocks: int = 0
    """Running requests for which a block each is kept to grow into. A victim needs none."""
    slots: int = 0
    """Slots that are missing too; each victim frees one."""

    def is_met(self, num_blocks: int, num_victims: int) -> bool:
        growing = max(0, self.num_growth_blocks - num_victims)
        return num_blocks >= self.blocks + growing and num_victims >= self.slots


def choose_victims(
    needer: Request,
    running: Iterable[Request],
    shortage: CapacityShortage,
    reclaim: ReclaimEstimate,
    *,
    same_priority: bool,
) -> list[Request]:
    """Returns the requests to preempt so that `needer` can continue: lowest priority first, then latest arrival, then
    least work lost. `reclaim` holds the blocks that are free or on their way back already.

    Returns no victims if all candidates together do not make enough room, since they would lose their work in vain.
    Leaves out each victim without which there is enough room. A victim always comes after the needer in the queue's
    order, so the oldest request of the highest priority never loses its blocks. With `same_priority` False, only
    requests of lower priority are candidates.
    """
    candidates = [
        request
        for request in running
        if request is not needer
        and (queue_key(request) > queue_key(needer) if same_priority else request.priority > needer.priority)
    ]
    candidates.sort(
        key=lambda r: (r.priority, r.arrival_s, -r.num_computed, r.arrival_number, r.request_id), reverse=True
    )
    victims: list[Request] = []
    while candidates and not shortage.is_met(reclaim.num_blocks, len(victims)):
        victims.append(candidates.pop(0))
        reclaim.add(victims[-1].held_block_ids)
    if not shortage.is_met(reclaim.num_blocks, len(victims)):
        return []
    for request in victims[::-1]:
        reclaim.undo_add(request.held_block_ids)
        if shortage.is_met(reclaim.num_blocks, len(victims) - 1):
            victims.remove(request)
        else:
            reclaim.add(request.held_block_ids)
    return victims


def must_run_alone(request: Request) -> bool:
    """Returns whether the request has been in too many crashes without progress, of the worker or of the engine. Its
    next step runs it alone, so that another crash hurts no other request and shows whether this one is the cause."""
    return is_suspect(request.worker_crashes, request.engine_crashes)


def is_suspect(worker_crashes: int, engine_crashes: int) -> bool:
    return max(worker_crashes, engine_crashes) >= CRASHES_TO_ISOLATE

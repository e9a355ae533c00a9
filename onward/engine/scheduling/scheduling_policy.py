"""The engine's choices: facts in, decision out. No state, no side effects; read this to know who wins."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.request import DraftAcceptance, Request
from onward.engine.scheduling.block_pool import ReclaimEstimate
from onward.proto.engine import CRASHES_TO_ISOLATE

QueueKey = tuple[int, float, int, str]

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""What a client that finds the queue full is told at least and at most."""

MAX_WAIT_CREDIT_S = 300.0
"""How much earlier than it came to this engine a request can count as arrived, for the time it has waited before."""

MAX_CRASH_CHARGES = 3


def queue_key(request: Request) -> QueueKey:
    """Smaller is served first: priority, then arrival by this engine's clock; among those of one turn, the order in which
    they came. `Scheduler._admit_waiting` says when a waiting request may be passed by one with a larger key."""
    return request.priority, request.arrival_s, request.arrival_number, request.request_id


def credited_arrival_s(now_s: float, waited_s: float) -> float:
    """When a request that comes now has arrived, with credit for the time that it has waited elsewhere. Only durations are
    believed, and only up to a bound: no sender's clock decides which request is served first."""
    return now_s - max(0.0, min(waited_s, MAX_WAIT_CREDIT_S))


def retry_after_s(excess: float, per_s: float | None) -> float:
    """When to come back: by then the excess is worked off, at the rate of late. Without any it is worth a try soon."""
    return max(MIN_RETRY_S, min(MAX_RETRY_S, excess / per_s)) if per_s else MIN_RETRY_S


def chunk_size(num_to_plan: int, budget: int) -> int:
    return min(num_to_plan, budget)


def may_admit(blocks_needed: int, blocks_available: int, num_running: int) -> bool:
    """Room for the whole list, and a block for each running request to grow into: who is let in too early is
    preempted at once."""
    return blocks_needed + num_running <= blocks_available


def may_offer(tokens_ahead: int, tokens_per_step: int) -> bool:
    """A peer's blocks are asked for when those before leave room in about one step: earlier, they would wait there
    unused; later, we would."""
    return tokens_ahead <= tokens_per_step


def should_prefill_locally(request: Request, num_uncached: int, config: EngineConfig) -> bool:
    """Whether a decode instance computes this one's prompt itself, without asking a peer: little is missing, or it has
    begun here before and was preempted. A vector is always made here: there is nothing to hand over."""
    if request.spec.sampling_params.pooling is not None:
        return True
    if not config.local_prefill:
        return False
    return request.prefill_locally or request.num_preemptions > 0 or num_uncached <= config.local_prefill_tokens


def should_reschedule(request: Request) -> bool:
    """Preempted where prompts may not be computed: it would need a peer's help to come back to an instance that is full.
    Where somebody above can move it, it moves."""
    return request.spec.is_routed and request.num_preemptions > 0


STEP_OVERHEAD_ROWS = 4.0
"""What a step costs before its first row, in rows. Measured on two cores: a step takes about (4 + rows) ms."""
PROBE_INTERVAL_TOKENS = 16
"""After so many tokens without a draft it is tried again, whatever became of the last ones; after more in a fuller step,
where there is less to win."""
PROBE_DRAFTS = 2


@dataclass(slots=True)
class StepLoad:
    """Of a step that is being planned."""

    num_rows: int
    """Without drafts."""
    num_draft_rows_left: int
    """For drafts."""
    draft_cost: float = 0.0
    """Of one more guess for everybody: a share of what the step takes anyhow."""


def choose_num_drafts(limit: int, acceptance: DraftAcceptance, load: StepLoad, num_given: int = 0) -> int:
    """How many tokens a request drafts in this step, at most `limit`. `num_given`: so many guesses of a peer are used
    instead of new ones, and cost no guessing.

    A step of n rows takes STEP_OVERHEAD_ROWS + n, in the time of a row, and gives n tokens. One more draft takes the time
    of a row and of its guessing, and gives a token if it and all before it are right. It is worth that if it gives more for
    its time than the step does: alone nearly always, in a full step never. A model that guesses does so for all n at once,
    in a pass that takes a share of the step's time, however many they are; so each guess takes that share of a token's
    time.
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
    """Of the request in question."""
    available: bool
    """False for a while after it has failed."""


MAX_ATTEMPTS_PER_PEER = 3
"""Where a prompt may not be computed here; else each peer is tried once."""


def choose_prefill_peer(peers: Sequence[PrefillPeerCandidate], *, may_fall_back: bool) -> PrefillPeerCandidate | None:
    """The one with the least attempts of this request, then the least work; None if all have had their chance."""
    limit = 1 if may_fall_back else MAX_ATTEMPTS_PER_PEER
    candidates = [peer for peer in peers if peer.available and peer.num_attempts < limit]
    return min(candidates, key=lambda peer: (peer.num_attempts, peer.num_in_flight), default=None)


def can_retry_later(peers: Sequence[PrefillPeerCandidate]) -> bool:
    """Whether a peer that is away now may still be asked later, where the prompt may not be computed here."""
    return any(peer.num_attempts < MAX_ATTEMPTS_PER_PEER for peer in peers)


@dataclass(frozen=True, slots=True)
class CapacityShortage:
    """What a request needs to go on."""

    blocks: int
    num_growth_blocks: int = 0
    """Running requests for which a block each is kept to grow into. A victim needs none."""
    slots: int = 0
    """So many slots are missing too; each victim brings one."""

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
    """The requests to preempt so that `needer` can go on: lowest priority first, then latest arrival, then least work lost.

    None if all of them together would not make enough room: they would lose their work, and their blocks would lie unused.
    None either of those without which there is enough room. And never one that comes before the needer in the queue's
    order, so the oldest of the highest priority never loses its blocks. With `same_priority` False only lower priorities
    are taken. `reclaim` holds what is free or on its way back already.
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
    """Twice under a crash without progress, of the worker or of the engine: the third time no other request is hurt, and
    the cause is known."""
    return is_suspect(request.worker_crashes, request.engine_crashes)


def is_suspect(worker_crashes: int, engine_crashes: int) -> bool:
    return max(worker_crashes, engine_crashes) >= CRASHES_TO_ISOLATE

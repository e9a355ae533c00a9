"""State of one request in the engine. `Request.set_status` is the only function that changes its status.

WAITING ──admit──> RUNNING ──finish──> FINISHED(reason)
   ^                  │ preempt
   └──reply─── PREEMPTING            any live state ──abort──> FINISHED

Prompt computed by a peer:    WAITING ──ask──> ASKED ──blocks are leased──> GRANTED ──KV is here──> RUNNING
Prompt computed for a peer:   WAITING ──room──> OFFERED ──the peer's blocks are leased──> RUNNING

token_ids   |---- prompt ----|---- generated ----|·· samples of steps in flight ··|
            0           num_prompt          len(token_ids)                   planned_len
KV          |------ num_computed ------|·· steps in flight ··|
                                                         planned_computed
planned_len and planned_computed assume that all drafts in flight are accepted, because room is kept for that case.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from onward.engine.request_phases import PhaseLog
from onward.pd.handoff_events import HandoffKey
from onward.proto import finish_reasons
from onward.proto.block_hash import BlockHash, extend_block_hashes
from onward.proto.engine import Submit
from onward.proto.kv_transfer import KvPush
from onward.proto.request_ids import external_id
from onward.proto.step import TokenLogprobs

DECAY = 0.85
"""Each verification counts this much less with every later one: text changes."""
PRIOR_DRAFTED, PRIOR_ACCEPTED = 2.0, 1.3
"""The acceptance assumed for a request that has not drafted yet: drafting is tried while there is spare room, and not
under load."""


@dataclass(slots=True)
class DraftAcceptance:
    """How a request's drafts have fared: all of them, for figures; the latest ones, to guess how the next will."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    """Steps that had drafts."""
    tokens_since_draft: int = 0
    """Tokens since the last of them."""
    _drafted: float = PRIOR_DRAFTED
    _accepted: float = PRIOR_ACCEPTED

    @property
    def acceptance_rate(self) -> float:
        """Estimated probability that a draft is accepted if all drafts before it were."""
        return self._accepted / self._drafted

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Records a step that had `num_drafted` drafts and gave `num_accepted` of them and one more token."""
        if not num_drafted:
            self.tokens_since_draft += 1
            return
        self.tokens_since_draft = 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_verifications += 1
        # Behind the first wrong one nothing is known of the others.
        tries = min(num_drafted, num_accepted + 1)
        self._drafted = DECAY**tries * self._drafted + tries
        self._accepted = DECAY**tries * self._accepted + num_accepted


class RequestStatus(Enum):
    WAITING = "waiting"
    ASKED = "asked"
    GRANTED = "granted"
    OFFERED = "offered"
    RUNNING = "running"
    PREEMPTING = "preempting"
    FINISHED = "finished"


ALLOWED_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.ASKED, RequestStatus.OFFERED, RequestStatus.FINISHED},
    RequestStatus.ASKED: {RequestStatus.GRANTED, RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.GRANTED: {RequestStatus.RUNNING, RequestStatus.ASKED, RequestStatus.FINISHED},
    RequestStatus.OFFERED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    # RUNNING goes back to WAITING if its worker has died, or if the worker does not know of the slot yet.
    RequestStatus.RUNNING: {RequestStatus.PREEMPTING, RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.PREEMPTING: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = finish_reasons.ABORT
    ERROR = "error"
    PD_RESCHEDULE = finish_reasons.PD_RESCHEDULE
    """This instance cannot go on with it, another one can."""
    HANDED_OFF = "handed_over"
    """For a prompt that is computed for a peer: its first token is sampled, and the peer generates the rest."""


class RecomputeCause(Enum):
    """Why KV that was computed once is computed again."""

    PREEMPTION = "preemption"
    WORKER = "worker"
    """Our worker died."""
    ENGINE = "engine"
    """The engine that had it died; its api process has submitted it again."""
    LOST = "lost"
    """A message between api process and engine was lost."""
    RESUME = "resume"
    """It began elsewhere: a router or a client goes on with its tokens here."""


@dataclass(slots=True, frozen=True)
class PlannedRun:
    """This request's part of a step whose result has not arrived yet."""

    step: int
    num_tokens: int
    samples: bool
    """Whether it reaches the end of what is known and so draws a token."""
    num_drafts: int = 0
    """Further tokens that it may compute and draw, if it guesses them right."""


@dataclass(slots=True, eq=False)
class Request:
    spec: Submit
    """The request as it was submitted. It never changes; all other fields are the engine's state around it."""
    api_id: str
    """The api process that holds the client; empty for a prompt that is computed for a peer."""
    token_ids: list[int]
    max_output_tokens: int
    arrival_s: float
    """By this engine's clock, less the credit for time that it has waited before."""
    submitted_s: float
    deadline_at_s: float | None
    num_prompt: int = field(init=False)
    arrival_number: int = 0
    """Position among all requests that have arrived at this engine; see `LiveRequests`."""
    worker_crashes: int = 0
    engine_crashes: int = 0
    crash_charge_position: int = 0
    """A token behind this position resets both crash counts."""
    max_drafts: int = 0
    """Tokens that it may draft in a step, as the request and the instance allow."""
    draft_acceptance: DraftAcceptance = field(default_factory=DraftAcceptance)
    peer_draft_token_ids: list[int] = field(default_factory=list)
    """Drafts of the peer that computed the prompt, for the first step here."""
    num_cached_tokens: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    num_prompt_counted: int = 0
    """The part of the prompt that was computed at least once: it counts towards the rate of work once."""
    block_ids: list[int] = field(default_factory=list)
    """One block for each `block_size` tokens; see `held_block_ids`."""
    num_freed_blocks: int = 0
    """Leading blocks that were given up because no layer looks so far back. Their places in `block_ids` stay."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_hashed_blocks: int = 0
    """Leading blocks of `block_ids` that the prefix cache knows."""
    slot: int | None = None
    slot_epoch: int = 0
    planned_runs: deque[PlannedRun] = field(default_factory=deque)
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Gathered while the prompt is computed, sent with the first delta."""
    score_from: int | None = None
    """An index of `token_ids`: the logprobs of the tokens from there on are wanted with the first delta."""
    handoff: HandoffKey | None = None
    """Set on a prompt that we compute for a peer."""
    push: KvPush | None = None
    """Where its KV goes, once the peer has granted blocks."""
    prefill_locally: bool = False
    """No peer is asked (again) for this one."""
    assign_pending: bool = False
    """The request has a slot that the worker does not know of yet."""
    num_sent_tokens: int = 0
    """Tokens of the output that the layer above has, or is about to get."""
    finish_sent: bool = False
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Leading tokens whose KV was computed by this or an earlier engine and is lost. They are computed again unless
    they are cached."""
    recompute_cause: RecomputeCause | None = None
    """Why it was lost."""
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    phases: PhaseLog | None = None
    """Only for a traced request."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.spec.prompt_token_ids)
        assert self.num_prompt > 0, "a prompt has at least one token"
        assert self.num_prompt <= len(self.token_ids), "the tokens begin with the prompt"
        assert self.max_output_tokens > 0, "a request that may produce nothing is refused by admission"
        self.num_sent_tokens = self.num_generated
        if cause := self.spec.restart_cause or (self.num_generated and "resume"):
            # It has run before: the KV of all but the newest token was computed. Without tokens that is not known.
            self.num_lost_tokens = len(self.token_ids) - 1 if self.num_generated else 0
            self.recompute_cause = RecomputeCause(cause)

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks of `block_ids` that this request still holds a reference to."""
        return self.block_ids[self.num_freed_blocks :]

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def epoch(self) -> int:
        """Epoch of the submission that created this request."""
        return self.spec.epoch

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def caller(self) -> str:
        return self.spec.caller

    @property
    def external_id(self) -> str:
        """The id that the client knows: the request id without the choice index."""
        return external_id(self.request_id)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def planned_computed(self) -> int:
        planned = self.num_computed
        for (
            run
        ) in self.planned_runs:  # a loop: asked several times for every request and step, and there are two at most
            planned += run.num_tokens + run.num_drafts
        return planned

    @property
    def planned_len(self) -> int:
        planned = len(self.token_ids)
        for run in self.planned_runs:
            if run.samples:
                planned += 1 + run.num_drafts
        return planned

    @property
    def num_plannable_tokens(self) -> int:
        """Tokens that a further step could compute. Nothing, if the steps in flight may already reach the length limit."""
        planned_len = self.planned_len
        if planned_len - self.num_prompt >= self.max_output_tokens:
            return 0
        return planned_len - self.planned_computed

    @property
    def max_drafts_now(self) -> int:
        """Drafts that a further step could have, behind its one token: none beyond the length limit."""
        if self.first_scored_row is not None:
            return 0
        return min(self.max_drafts, self.max_output_tokens - (self.planned_len - self.num_prompt) - 1)

    @property
    def has_drafts_in_flight(self) -> bool:
        return any(run.num_drafts for run in self.planned_runs)

    @property
    def last_planned_step(self) -> int | None:
        return self.planned_runs[-1].step if self.planned_runs else None

    @property
    def first_scored_row(self) -> int | None:
        """First row whose logits or hidden state are needed, so that no row from here on may come from the cache. Row i
        scores token i + 1. None once they were sent."""
        sampling = self.spec.sampling_params
        if sampling.pooling == "mean" or (sampling.prompt_logprobs is not None and self.num_generated == 0):
            return 0
        return None if self.score_from is None else self.score_from - 1

    @property
    def first_logits_row(self) -> int | None:
        """From this one on every row's logits are wanted, and a step has few such rows. A mean is made without logits."""
        return None if self.spec.sampling_params.pooling is not None else self.first_scored_row

    def lose_kv(self, cause: RecomputeCause) -> None:
        """Records that the slot and the blocks are given up, and with them the computed KV."""
        self.num_lost_tokens, self.recompute_cause = self.num_computed, cause

    def set_status(self, status: RequestStatus) -> None:
        assert status in ALLOWED_TRANSITIONS[self.status], f"{self.request_id}: {self.status} -> {status}"
        if self.phases is not None:
            self._log_phase(self.phases, status)
        self.status = status

    def _log_phase(self, phases: PhaseLog, status: RequestStatus) -> None:
        num_tokens = self.num_generated
        match status:
            case RequestStatus.RUNNING if self.status is not RequestStatus.GRANTED:
                phases.enter("prefill", num_tokens, num_cached=self.num_computed)
            case RequestStatus.PREEMPTING:
                phases.enter("queue", num_tokens, cause="preemption")
            case RequestStatus.WAITING if self.status is RequestStatus.ASKED:
                phases.enter("queue", num_tokens, cause="handoff_failed")
            case RequestStatus.WAITING if self.recompute_cause is RecomputeCause.WORKER:
                phases.enter("queue", num_tokens, cause="worker_crash")
            case RequestStatus.WAITING if self.status is RequestStatus.RUNNING:
                phases.enter("queue", num_tokens, cause="preemption")
            case RequestStatus.ASKED:
                was_granted = self.status is RequestStatus.GRANTED
                phases.enter("handoff", num_tokens, cause="handoff_failed" if was_granted else "")
            case RequestStatus.FINISHED:
                phases.enter("ended" if self.handoff is None else "transfer", num_tokens)
            case _:  # a phase goes on
                pass

    def compute_block_hashes(self, block_size: int, num_blocks: int) -> list[BlockHash]:
        """Names of the first `num_blocks` blocks, all of them full. The list only grows, so names stay."""
        extend_block_hashes(self.block_hashes, self.token_ids, num_blocks, block_size, self.spec.cache_salt)
        return self.block_hashes[:num_blocks]

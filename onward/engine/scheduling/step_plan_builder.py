"""A step's plan while it is being made. What is in it can still be taken back; what `build` returns cannot."""

from dataclasses import dataclass, field

from onward.engine.request import PlannedRun, Request
from onward.proto.step import MAX_PROMPT_LOGPROB_ROWS, AssignSlot, PreemptSlot, RunSlot, StepPlan


@dataclass(slots=True)
class StepPlanBuilder:
    step: int
    token_budget: int
    """Tokens that may still be given out."""
    prompt_logprob_budget: int = MAX_PROMPT_LOGPROB_ROWS
    """How many of these tokens may be prompt tokens whose logprobs are requested."""
    assigns: dict[Request, AssignSlot] = field(default_factory=dict)
    runs: dict[Request, RunSlot] = field(default_factory=dict)
    preempts: dict[Request, PreemptSlot] = field(default_factory=dict)
    short_of_blocks: bool = False
    """A running request could not continue. No new request is admitted until it can."""

    def add_run(self, request: Request, num_tokens: int, new_block_ids: list[int], num_drafts: int = 0) -> None:
        assert request.slot is not None, "only a request with a slot runs"
        self.runs[request] = RunSlot(request.slot, request.slot_epoch, num_tokens, new_block_ids, num_drafts)
        self.token_budget -= num_tokens + (num_drafts if request.handoff is None else 0)
        first_reported = request.first_logits_row
        if first_reported is not None and request.planned_computed >= first_reported:
            self.prompt_logprob_budget -= num_tokens

    def budget_for(self, request: Request, num_computed: int) -> int:
        """Returns the maximum tokens of the request's next chunk, which begins at row `num_computed`; may be 0. A
        chunk has only rows before `first_logits_row`, or only rows from it on. The latter are also limited by
        `prompt_logprob_budget`."""
        first_reported = request.first_logits_row
        if first_reported is None:
            return self.token_budget
        if num_computed < first_reported:
            return min(self.token_budget, first_reported - num_computed)
        return min(self.token_budget, self.prompt_logprob_budget)

    def add_assign(self, request: Request) -> None:
        assert request.slot is not None, "the slot was taken before"
        # Copies: the request's own lists grow while the plan is on its way.
        self.assigns[request] = AssignSlot(
            request.slot,
            request.slot_epoch,
            request.request_id,
            list(request.token_ids),
            request.num_prompt,
            request.num_computed,
            list(request.block_ids),
            request.spec.sampling_params,
            request.push,
            request.score_from,
            request.peer_draft_token_ids,
        )
        request.peer_draft_token_ids = []
        request.assign_pending = False

    def add_preempt(self, request: Request) -> None:
        assert request not in self.assigns, "no plan assigns a slot that it preempts"
        assert request.slot is not None, "only a running request is preempted"
        if taken_back := self.runs.pop(request, None):
            self.token_budget += taken_back.num_tokens + taken_back.max_draft_tokens
        self.preempts[request] = PreemptSlot(request.slot, request.slot_epoch)

    def build(self) -> StepPlan | None:
        """Returns the plan, or None if there is nothing to do. Adds the step to each request's planned runs, so the
        plan must be sent."""
        if not self.runs and not self.preempts:
            return None
        for request, run in self.runs.items():
            samples = run.num_tokens == request.num_plannable_tokens
            # Guesses for a peer are neither computed nor drawn here.
            num_drafts = run.max_draft_tokens if request.handoff is None else 0
            request.planned_runs.append(PlannedRun(self.step, run.num_tokens, samples, num_drafts))
        for request in self.preempts:
            request.planned_runs.append(PlannedRun(self.step, 0, samples=False))
        return StepPlan(self.step, list(self.preempts.values()), list(self.assigns.values()), list(self.runs.values()))

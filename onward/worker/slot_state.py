"""One request's state in its slot: what decides its next token, whatever device computes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot
from onward.text.reasoning.reasoning_tracker import ReasoningPhase as ThinkingStage
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from onward.worker.token_span import TokenSpan

if TYPE_CHECKING:
    from onward.worker.slot_push import SlotPush


@dataclass(slots=True, eq=False)
class SlotState:
    """As if every step that was launched were done, and had drawn one token where it draws.

    tokens   |---- prompt ----|---- generated ----|
             0           num_prompt           num_tokens
    KV       |------------------------>| num_computed
    """

    slot_epoch: int
    num_prompt: int
    num_tokens: int
    num_computed: int
    block_ids: list[int]
    max_tokens: int
    """Tokens that it has blocks for, within the context."""
    sampling: SamplingParams
    token_ids: list[int]
    """Those it was assigned with."""
    score_from: int | None
    wants_given_logprobs: bool
    """Logprobs of given tokens are asked for."""
    uses_filtering: bool
    processed_until: float
    """Before this position of its output, its logits are processed, or their logprobs are asked for."""
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None
    is_constrained: bool
    """Grammar or thinking follow what it says."""
    num_tokens_on_host: int
    """Tokens that grammar and thinking have seen: those that are on the host. The others are `num_tokens` behind."""
    constrained_from: float
    """From this position on, what is drawn depends on tokens that the host has to see first."""
    logits_processor: Any = None
    """The device's own. It follows the slot's tokens there."""
    pooler: Any = None
    """The device's own, where a vector is wanted, and no tokens."""
    push: "SlotPush | None" = None
    error: str | None = None
    """Its grammar failed behind the last token that it gave: it can give no more."""
    has_failed: bool = False
    """Found out later: what steps after that one drew for it is void."""

    def __post_init__(self) -> None:
        assert self.num_prompt <= self.num_tokens, "the prompt is the beginning of the slot's tokens"
        assert self.num_computed < self.num_tokens, "a new slot has at least one token to compute"

    @classmethod
    def of(
        cls, assign: AssignSlot, max_tokens: int, grammar: SlotGrammar | None, thinking: ReasoningTracker | None,
        *, has_processor: bool,
    ) -> "SlotState":  # fmt: skip
        sampling = assign.sampling_params
        always_processed = has_processor or sampling.logprobs is not None
        return cls(
            assign.slot_epoch,
            assign.num_prompt,
            len(assign.token_ids),
            assign.num_computed,
            list(assign.block_ids),
            max_tokens,
            sampling,
            assign.token_ids,
            assign.rescore_from,
            wants_given_logprobs=assign.rescore_from is not None or sampling.prompt_logprobs is not None,
            uses_filtering=_uses_filtering(sampling),
            processed_until=math.inf if always_processed else sampling.min_tokens if sampling.end_token_ids else 0,
            grammar=grammar,
            thinking=thinking,
            is_constrained=grammar is not None or thinking is not None,
            num_tokens_on_host=len(assign.token_ids),
            constrained_from=_constrained_from(sampling),
        )

    def accept_token(self, token_id: int) -> bool:
        """Advances grammar and reasoning by a sampled token. Returns whether nothing can follow. Raises
        `SlotGrammarError`, and then has not accepted it."""
        assert self.num_tokens_on_host < self.num_tokens, "only tokens of launched steps reach the host"
        is_done = constraints.advance(self, token_id)
        self.num_tokens_on_host += 1
        if self.grammar is None and self.thinking is not None and self.thinking.phase is ThinkingStage.BEHIND:
            self.constrained_from = math.inf
        return is_done

    def keep_draft(self) -> None:
        """A draft was right, so the step has drawn one token more, and computed one more."""
        self.num_tokens += 1
        self.num_computed += 1

    def undo_sample(self) -> None:
        """A token that was to be drawn was not: its logits are wanted again."""
        assert self.num_computed == self.num_tokens - 1, "only the newest sample is undone"
        self.num_tokens -= 1
        self.num_computed -= 1


def _uses_filtering(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _constrained_from(sampling: SamplingParams) -> float:
    """A budget forces nothing before so many tokens were drawn."""
    if sampling.grammar is not None:
        return 0
    budget = None if sampling.reasoning is None else sampling.reasoning.budget
    return math.inf if budget is None else budget


def given_tokens(spans: Sequence[TokenSpan[SlotState]]) -> tuple[list[int], list[int]]:
    """Of each position whose logprobs are asked for: the given token behind it, and how many of the likeliest tokens are
    asked for in its place. The token is one of the prompt, or of the output, drawn once before."""
    tokens: list[int] = []
    num_tops: list[int] = []
    for span in spans:
        slot, sampling = span.slot_state, span.slot_state.sampling
        for position in span.logprob_positions or ():
            tokens.append(slot.token_ids[position + 1])
            is_prompt = position + 1 < slot.num_prompt
            num_tops.append((sampling.prompt_logprobs if is_prompt else sampling.logprobs) or 0)
    return tokens, num_tops

"""The state of a request in its slot: everything that decides its next token, on any device."""

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
    """The state after all launched steps, as if each were done and had sampled one token where it samples.

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
    """Tokens that the slot has blocks for, within the context."""
    sampling: SamplingParams
    token_ids: list[int]
    """The token list of its assignment."""
    score_from: int | None
    wants_given_logprobs: bool
    """Logprobs of given tokens are requested."""
    uses_filtering: bool
    processed_until: float
    """Before this position of the output, logits are processed or logprobs are requested."""
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None
    is_constrained: bool
    """The request has a grammar or a reasoning tracker, which follow its output."""
    num_tokens_on_host: int
    """Tokens that are on the host, so that grammar and reasoning tracker have seen them. It may lag behind
    `num_tokens`."""
    constrained_from: float
    """From this position of the output on, sampling depends on tokens that the host has to see first."""
    logits_processor: Any = None
    """The device's logits processor, which follows the slot's tokens on the device."""
    pooler: Any = None
    """The device's pooler, for a request that wants a vector and no tokens."""
    push: "SlotPush | None" = None
    error: str | None = None
    """The grammar failed after the last token, so no token can follow."""
    has_failed: bool = False
    """The request has failed. Later steps may have been launched before that was known; their tokens are dropped."""

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
        """Counts an accepted draft: the step has sampled and computed one token more."""
        self.num_tokens += 1
        self.num_computed += 1

    def undo_sample(self) -> None:
        """Removes the newest token from the counts, because it was not sampled: a later step computes its logits
        again."""
        assert self.num_computed == self.num_tokens - 1, "only the newest sample is undone"
        self.num_tokens -= 1
        self.num_computed -= 1


def _uses_filtering(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _constrained_from(sampling: SamplingParams) -> float:
    """Returns the first position that constraints apply to. A reasoning budget forces no token before it is used up."""
    if sampling.grammar is not None:
        return 0
    budget = None if sampling.reasoning is None else sampling.reasoning.budget
    return math.inf if budget is None else budget


def given_tokens(spans: Sequence[TokenSpan[SlotState]]) -> tuple[list[int], list[int]]:
    """Returns two lists, for the positions whose logprobs are requested: the given token after each position, and how
    many of the likeliest tokens to list for it. The token belongs to the prompt, or to the output that was sampled
    before."""
    tokens: list[int] = []
    num_tops: list[int] = []
    for span in spans:
        slot, sampling = span.slot_state, span.slot_state.sampling
        for position in span.logprob_positions or ():
            tokens.append(slot.token_ids[position + 1])
            is_prompt = position + 1 < slot.num_prompt
            num_tops.append((sampling.prompt_logprobs if is_prompt else sampling.logprobs) or 0)
    return tokens, num_tops

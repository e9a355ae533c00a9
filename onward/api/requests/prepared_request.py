"""A request that was checked, with all that is fixed about it before the work begins."""

from dataclasses import dataclass

from onward.api.requests.schemas import GenerationRequest
from onward.api.requests.structured_outputs import RequestedGrammar
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.router import Attempt
from onward.proto.step import TokenLogprobs
from onward.web.openai_api.tools import NO_TOOLS, ResolvedTools


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check but those that need the engine."""

    attempt: Attempt
    request: GenerationRequest
    unknown_fields: tuple[str, ...]
    prompt_token_ids: list[list[int]]
    bad_word_token_ids: tuple[tuple[int, ...], ...]
    arrived_at_s: float
    """By this process's clock, less the time that it had waited before it came here."""
    deadline_at_s: float | None
    is_routed: bool
    """A router asks, and reads the tokens."""
    tools: ResolvedTools = NO_TOOLS
    grammar: RequestedGrammar | None = None
    reasoning: ReasoningParams | None = None
    grammar_completed_at: tuple[int | None, ...] = ()
    """Of each choice's given tokens how many complete the structure, once that is known."""
    prior_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of a stored response: the logprobs of its first given tokens, as an earlier attempt has kept them."""

    @property
    def is_resumed(self) -> bool:
        """The answer has begun in an earlier attempt."""
        return bool(self.attempt.choices or self.attempt.reader_positions)

    @property
    def num_cached_tokens(self) -> int | None:
        """Of the first admission, if there was one before. Of several prompts each would have its own, and they are not
        told apart: what a later admission finds is told instead."""
        return self.attempt.num_cached_tokens if len(self.prompt_token_ids) == 1 else None

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompt_token_ids[choice // self.request.num_candidates]

    @property
    def returns_whole_body(self) -> bool:
        """All of the answer is told at its end, also what an earlier attempt has made."""
        return self.is_routed and not self.request.stream

    @property
    def needs_full_output(self) -> bool:
        """What is told needs all of the answer, also where its reader has a part."""
        return self.returns_whole_body or self.request.needs_full_output

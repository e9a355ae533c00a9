"""A checked request, with everything that is fixed before it is submitted to the engine."""

from dataclasses import dataclass

from onward.api.requests.schemas import GenerationRequest
from onward.api.requests.structured_outputs import RequestedGrammar
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.router import Attempt
from onward.proto.step import TokenLogprobs
from onward.text.stop_patterns import StopPatterns
from onward.web.openai_api.tools import NO_TOOLS, ResolvedTools


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed all checks except those that need the engine."""

    attempt: Attempt
    request: GenerationRequest
    unknown_fields: tuple[str, ...]
    prompt_token_ids: list[list[int]]
    bad_word_token_ids: tuple[tuple[int, ...], ...]
    arrived_at_s: float
    """Arrival by this process's clock, less the time that the request had waited before."""
    deadline_at_s: float | None
    is_routed: bool
    """Whether the request comes from a router, which reads the tokens."""
    tools: ResolvedTools = NO_TOOLS
    stop_patterns: StopPatterns | None = None
    """Compiled once: every choice has a matcher of its own."""
    grammar: RequestedGrammar | None = None
    reasoning: ReasoningParams | None = None
    grammar_completed_at: tuple[int | None, ...] = ()
    """For each choice, the number of given tokens that complete the grammar, or None. Empty until it is validated."""
    prior_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the first given tokens of a stored response, as an earlier attempt has stored them."""

    @property
    def is_resumed(self) -> bool:
        """Whether the response has begun in an earlier attempt."""
        return bool(self.attempt.choices or self.attempt.reader_positions)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prefix-cache hit of the first admission in an earlier attempt, if there was one. None for several prompts: an
        attempt has only their sum, so the hits of a later admission are reported."""
        return self.attempt.num_cached_tokens if len(self.prompt_token_ids) == 1 else None

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompt_token_ids[choice // self.request.num_candidates]

    @property
    def returns_whole_body(self) -> bool:
        """Whether a router gets the complete body at the end, including the output of earlier attempts."""
        return self.is_routed and not self.request.stream

    @property
    def needs_full_output(self) -> bool:
        """Whether the response depends on the whole output, even if its reader already has a part of it."""
        return self.returns_whole_body or self.request.needs_full_output

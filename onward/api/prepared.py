"""A request that was checked, with all that is fixed about it before the work begins."""

from dataclasses import dataclass

from onward.api.requests import GenerationRequest
from onward.api.structured import Wanted
from onward.proto.router import Attempt
from onward.proto.thinking import ThinkingRule
from onward.web.tooling import NO_TOOLS, ToolPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check but those that need the engine."""

    attempt: Attempt
    request: GenerationRequest
    unknown_fields: tuple[str, ...]
    prompts: list[list[int]]
    bad_words: tuple[tuple[int, ...], ...]
    arrived_at_s: float
    """By this process's clock, less the time that it had waited before it came here."""
    deadline_at_s: float | None
    is_routed: bool
    """A router asks, and reads the tokens."""
    plan: ToolPlan = NO_TOOLS
    structure: Wanted | None = None
    thinking: ThinkingRule | None = None
    grammar_ends: tuple[int | None, ...] = ()
    """Of each choice's given tokens how many complete the structure, once that is known."""

    @property
    def is_continued(self) -> bool:
        """The answer has begun in an earlier attempt."""
        return bool(self.attempt.choices or self.attempt.skip_to)

    @property
    def num_cached_tokens(self) -> int | None:
        """Of the first admission, if there was one before. Of several prompts each would have its own, and they are not
        told apart: what a later admission finds is told instead."""
        return self.attempt.num_cached_tokens if len(self.prompts) == 1 else None

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.request.num_candidates]

    @property
    def is_whole(self) -> bool:
        """All of the answer is told at its end, also what an earlier attempt has made."""
        return self.is_routed and not self.request.stream

    @property
    def tells_all(self) -> bool:
        """What is told needs all of the answer, also where its reader has a part."""
        return self.is_whole or self.request.tells_all

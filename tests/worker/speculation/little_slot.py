"""A slot that knows only what a draw needs."""

from dataclasses import dataclass

from onward.proto.sampling import SamplingParams
from onward.text.reasoning.thinking_tokens import ReasoningTracker
from onward.worker.penalties import LogitsProcessor
from onward.worker.slot_grammar import SlotGrammar


@dataclass(slots=True)
class LittleSlot:
    num_prompt: int
    num_tokens: int
    sampling: SamplingParams
    rules: LogitsProcessor | None = None
    grammar: SlotGrammar | None = None
    thinking: ReasoningTracker | None = None

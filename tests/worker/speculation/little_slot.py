"""A slot that knows only what a draw needs."""

from dataclasses import dataclass

from onward.proto.sampling_params import SamplingParams
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.logits_processors.slot_grammar import SlotGrammar


@dataclass(slots=True)
class LittleSlot:
    num_prompt: int
    num_tokens: int
    sampling: SamplingParams
    logits_processor: LogitsProcessor | None = None
    grammar: SlotGrammar | None = None
    thinking: ReasoningTracker | None = None

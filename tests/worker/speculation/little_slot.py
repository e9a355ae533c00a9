"""A slot that knows only what a draw needs."""

from dataclasses import dataclass

from onward.proto.sampling import Sampling
from onward.text.reasoning.thinking_tokens import Thinking
from onward.worker.penalties import LogitRules
from onward.worker.slot_grammar import SlotGrammar


@dataclass(slots=True)
class LittleSlot:
    num_prompt: int
    num_tokens: int
    sampling: Sampling
    rules: LogitRules | None = None
    grammar: SlotGrammar | None = None
    thinking: Thinking | None = None

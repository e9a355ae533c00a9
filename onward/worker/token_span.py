"""The tokens that one slot computes in one step."""

from dataclasses import dataclass
from typing import Generic, TypeVar

NO_BLOCK = -1
Owner = TypeVar("Owner")


@dataclass(slots=True)
class TokenSpan(Generic[Owner]):
    """The tokens [start, end) of one slot, and drafts after them. One is made for each row that decodes, so it has only
    the fields that it needs."""

    slot: int
    start: int
    end: int
    is_sampled: bool
    """The last token is the newest known one, so its logits decide the next token. Drafts may decide further ones."""
    slot_state: Owner
    """The state of the request that the slot belonged to when the step was launched."""
    position: int = 0
    """Index in the output of the token that is sampled."""
    new_block: int = NO_BLOCK
    """The block for the last token, if it is the only new one and the device takes it with the row."""
    logprob_positions: range | None = None
    """Positions whose logits are needed for the logprobs of the given tokens after them. None: not requested."""
    is_pooled: bool = False
    """The hidden states of its rows are pooled, and no token is sampled."""
    drafts: tuple[int, ...] = ()
    """Also in the token table, after the slot's list."""

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def num_rows(self) -> int:
        return self.end - self.start + len(self.drafts)

    @property
    def decodes(self) -> bool:
        return self.is_sampled and self.end - self.start == 1 and self.logprob_positions is None


def unowned_span(slot: int, start: int, count: int, *, is_sampled: bool) -> TokenSpan[None]:
    """Returns a span without an owner (`slot_state` is None), for a forward pass of a draft model or layer. Such a
    pass is not part of a step of the served model."""
    return TokenSpan(slot, start, start + count, is_sampled, None)

"""What one slot computes in one step."""

from dataclasses import dataclass
from typing import Generic, TypeVar

NO_BLOCK = -1
Owner = TypeVar("Owner")


@dataclass(slots=True)
class TokenSpan(Generic[Owner]):
    """The tokens [start, end) of one slot, and drafts behind them. One is made for each row that decodes, so it has no
    more than it needs."""

    slot: int
    start: int
    end: int
    is_sampled: bool
    """The last one's logits decide the next token: it is the newest known. Drafts may decide further ones."""
    slot_state: Owner
    """The state of the request that the slot belonged to when the step was launched."""
    position: int = 0
    """Index in its output of the token that is drawn."""
    new_block: int = NO_BLOCK
    """For its last token, if its table gets just that one, and the device takes it with the row."""
    logprob_positions: range | None = None
    """Positions whose logits are wanted, to tell how likely the given tokens behind them were. None: of no interest."""
    is_pooled: bool = False
    """Its rows' outputs are wanted, and no token."""
    drafts: tuple[int, ...] = ()
    """They lie in the token table too, behind the slot's list."""

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
    """A span of tokens that are computed for their logits or their KV alone, outside of any step."""
    return TokenSpan(slot, start, start + count, is_sampled, None)

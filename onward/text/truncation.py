"""A request's wish to cut its prompt to a number of tokens, from either side."""

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    max_tokens: int
    """Number of tokens that a longer prompt keeps."""
    side: Side = "left"
    """The side that is cut off. `left`: the last tokens are kept; `right`: the first ones."""

    def cut(self, token_ids: list[int]) -> list[int]:
        return token_ids[: self.max_tokens] if self.side == "right" else token_ids[-self.max_tokens :]

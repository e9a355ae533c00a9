"""Which tokens begin and end a model's thinking, and how long it may be. Part of how the next token is chosen."""

import msgspec

from onward.proto.field_types import Count


class ReasoningParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker follows a request's thinking, and forces its end when the budget is used up. A forced end is the
    tokens of the prefix and then of the end tag: at each of these positions, the worker allows one token only."""

    begin_token_ids: tuple[Count, ...]
    end_token_ids: tuple[Count, ...]
    starts_in_reasoning: bool = False
    """The prompt has opened the thinking."""
    budget: Count | None = None
    """Tokens that thinking may have, its tags not counted. None: as many as it likes."""
    forced_prefix_token_ids: tuple[Count, ...] = ()
    """Tokens before the end tag of a forced end, such as a line break, so that the end looks like one of the model's
    own. Left out if the model has begun the end tag by itself."""

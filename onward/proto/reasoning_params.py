"""Which tokens begin and end a model's thinking, and how long it may be. Part of how the next token is chosen."""

import msgspec

from onward.proto.field_types import Count


class ReasoningParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    begin_token_ids: tuple[Count, ...]
    end_token_ids: tuple[Count, ...]
    starts_in_reasoning: bool = False
    """The prompt has opened the thinking."""
    budget: Count | None = None
    """Tokens that thinking may have, its tags not counted. None: as many as it likes."""
    forced_prefix_token_ids: tuple[Count, ...] = ()
    """Written before an end that is forced, so that the model finds it natural."""

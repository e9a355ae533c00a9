"""Request fields that all generating endpoints share: sampling, the end of an answer, its priority."""

import msgspec


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields with the same names in every generating endpoint: how tokens are sampled, where an answer ends, and its
    priority and deadline."""

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    """Regular expressions. The output ends with the first match of one of them."""
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    """The only tokens that are sampled, end tokens included."""
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None

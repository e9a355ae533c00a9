"""What a client may say to every endpoint that generates, by the same names: how tokens are drawn, where an answer ends,
and how much it matters. What the values mean is not known here."""

import msgspec


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None

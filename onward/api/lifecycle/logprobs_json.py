"""The JSON of logprobs for each endpoint. Knows token ids and token bytes, and nothing of requests.

A token's `text` is its bytes read as UTF-8 by themselves, with U+FFFD where that is not possible. Its `bytes` are exact, so
the bytes of consecutive tokens join to the text even if a character is spread over several tokens.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from onward.proto.step import TokenLogprobs
from onward.text.detokenizer import Detokenizer
from onward.text.token_table import TokenTable

LOWEST_LOGPROB = -9999.0
"""Represents minus infinity, which JSON has no value for."""

PromptLogprobs = list[tuple[int, TokenLogprobs]]
"""The prompt's token ids, from the second one on, with their logprobs."""


def with_num_top(prompt: PromptLogprobs, num_top: int) -> PromptLogprobs:
    """Returns the logprobs with at most this many of the likeliest tokens of each position."""
    return [(token_id, replace(entry, top=entry.top[:num_top])) for token_id, entry in prompt]


class TokenStrings:
    """Names tokens by their text."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def text(self, token_id: int) -> str:
        if token_id >= len(self._table):
            return f"token_id:{token_id}"
        return self._table.token_bytes(token_id).decode("utf-8", "replace")

    def utf8_bytes(self, token_id: int) -> list[int]:
        return list(self._table.token_bytes(token_id))


class TokenIdStrings(TokenStrings):
    """Names tokens by their ids, for clients that must distinguish tokens with the same text."""

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


class TextOffsets:
    """Computes where each token of an output begins in its text: after the characters that earlier tokens complete."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(table, skip_special_tokens)
        self._num_characters = 0

    def push(self, token_id: int) -> int:
        offset = self._num_characters
        self._num_characters += len(self._detokenizer.push(token_id))
        return offset


def chat_logprobs(
    token_strings: TokenStrings, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    content = [
        _named(token_strings, token_id, entry.logprob)
        | {"top_logprobs": [_named(token_strings, *top) for top in entry.top]}
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_strings: TokenStrings,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """Returns the completions format: parallel lists. `top_logprobs` always has the token itself, so it may have one entry
    more than requested."""
    return {
        "tokens": [token_strings.text(token_id) for token_id in token_ids],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_by_text(token_strings, *pair) for pair in zip(token_ids, logprobs, strict=True)],
        "text_offset": list(text_offsets),
    }


def echoed_prompt_logprobs(
    token_strings: TokenStrings, prompt_token_ids: Sequence[int], prompt: PromptLogprobs, offsets: TextOffsets
) -> dict[str, Any]:
    """Returns the logprobs of a prompt that is echoed before its completion. The first token has none, because nothing
    precedes it."""
    logprobs = [entry for _, entry in prompt]
    fields = completion_logprobs(
        token_strings, prompt_token_ids[1:], logprobs, [offsets.push(token_id) for token_id in prompt_token_ids][1:]
    )
    first = {
        "tokens": token_strings.text(prompt_token_ids[0]),
        "token_logprobs": None,
        "top_logprobs": None,
        "text_offset": 0,
    }
    return {name: [first[name], *values] for name, values in fields.items()}


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Returns logprobs by token id, without text, for `/v1/generate`."""
    return [
        {
            "token_id": token_id,
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "top_logprobs": [{"token_id": top, "logprob": _finite(logprob)} for top, logprob in entry.top],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def prompt_logprobs(prompt: PromptLogprobs, token_strings: TokenStrings | None) -> list[dict[str, Any] | None]:
    """Returns one entry for each prompt token. The first one is None, because nothing precedes it."""
    return [None, *(_by_id(token_id, entry, token_strings) for token_id, entry in prompt)]


def _named(token_strings: TokenStrings, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_strings.text(token_id),
        "logprob": _finite(logprob),
        "bytes": token_strings.utf8_bytes(token_id),
    }


def _by_text(token_strings: TokenStrings, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    values: dict[str, float] = {}
    for top, logprob in (*entry.top, (token_id, entry.logprob)):
        # Different tokens may have the same text, such as parts of characters. The likeliest one is kept.
        values.setdefault(token_strings.text(top), _finite(logprob))
    return values


def _by_id(token_id: int, entry: TokenLogprobs, token_strings: TokenStrings | None) -> dict[str, Any]:
    ranked = {token_id: (entry.logprob, entry.rank)}
    ranked |= {top: (logprob, rank) for rank, (top, logprob) in enumerate(entry.top, 1) if top != token_id}
    return {
        str(values): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": None if token_strings is None else token_strings.text(values),
        }
        for values, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

"""Logprobs as each endpoint writes them. Knows tokens by their ids and bytes, and nothing of requests.

A token's `text` is its bytes read as UTF-8 by themselves, with U+FFFD where that is not possible; its `bytes` are
exact, so the bytes of consecutive tokens join to the text even where a character is spread over several.
"""

from collections.abc import Sequence
from typing import Any

from onward.proto.step import TokenLogprobs
from onward.text.detokenizer import Detokenizer
from onward.text.token_table import TokenTable

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

PromptLogprobs = list[tuple[int, TokenLogprobs]]
"""The prompt's tokens from the second one on."""


class TokenStrings:
    """How tokens are called in an answer."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def text(self, token_id: int) -> str:
        if token_id >= len(self._table):
            return f"token_id:{token_id}"
        return self._table.token_bytes(token_id).decode("utf-8", "replace")

    def utf8_bytes(self, token_id: int) -> list[int]:
        return list(self._table.token_bytes(token_id))


class TextOffsets:
    """Where each token of an output begins in its text: behind the characters that the tokens before it complete."""

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
    """The older form: parallel lists. `top_logprobs` always has the token itself, so it may hold one more than asked."""
    return {
        "tokens": [token_strings.text(token_id) for token_id in token_ids],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_by_text(token_strings, *pair) for pair in zip(token_ids, logprobs, strict=True)],
        "text_offset": list(text_offsets),
    }


def echoed_prompt_logprobs(
    token_strings: TokenStrings, prompt_token_ids: Sequence[int], prompt: PromptLogprobs, offsets: TextOffsets
) -> dict[str, Any]:
    """Those of a prompt that stands before its completion. Its first token has nothing before it that could predict it."""
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
    """For clients that speak in token ids: nothing is turned into text."""
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
    """One entry per prompt token. The first has nothing before it that could predict it, so it has none."""
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
        # Different tokens may have one text (halves of characters do); the likeliest is kept.
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

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


def chat_logprobs(names: TokenStrings, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = [
        _named(names, token_id, one.logprob) | {"top_logprobs": [_named(names, *top) for top in one.top]}
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenStrings, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offsets: Sequence[int]
) -> dict[str, Any]:
    """The older form: parallel lists. `top_logprobs` always has the token itself, so it may hold one more than asked."""
    return {
        "tokens": [names.text(token_id) for token_id in token_ids],
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "top_logprobs": [_by_text(names, *pair) for pair in zip(token_ids, logprobs, strict=True)],
        "text_offset": list(text_offsets),
    }


def echoed_prompt_logprobs(
    names: TokenStrings, prompt_token_ids: Sequence[int], prompt: PromptLogprobs, offsets: TextOffsets
) -> dict[str, Any]:
    """Those of a prompt that stands before its completion. Its first token has nothing before it that could predict it."""
    scores = [one for _, one in prompt]
    told = completion_logprobs(names, prompt_token_ids[1:], scores, [offsets.push(one) for one in prompt_token_ids][1:])
    first = {"tokens": names.text(prompt_token_ids[0]), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [first[name], *listed] for name, listed in told.items()}


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """For clients that speak in token ids: nothing is turned into text."""
    return [
        {
            "token_id": token_id,
            "logprob": _finite(one.logprob),
            "rank": one.rank,
            "top_logprobs": [{"token_id": top, "logprob": _finite(logprob)} for top, logprob in one.top],
        }
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]


def prompt_logprobs(prompt: PromptLogprobs, names: TokenStrings | None) -> list[dict[str, Any] | None]:
    """One entry per prompt token. The first has nothing before it that could predict it, so it has none."""
    return [None, *(_by_id(token_id, one, names) for token_id, one in prompt)]


def _named(names: TokenStrings, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.text(token_id), "logprob": _finite(logprob), "bytes": names.utf8_bytes(token_id)}


def _by_text(names: TokenStrings, token_id: int, one: TokenLogprobs) -> dict[str, float]:
    listed: dict[str, float] = {}
    for top, logprob in (*one.top, (token_id, one.logprob)):
        # Different tokens may have one text (halves of characters do); the likeliest is kept.
        listed.setdefault(names.text(top), _finite(logprob))
    return listed


def _by_id(token_id: int, one: TokenLogprobs, names: TokenStrings | None) -> dict[str, Any]:
    ranked = {token_id: (one.logprob, one.rank)}
    ranked |= {top: (logprob, rank) for rank, (top, logprob) in enumerate(one.top, 1) if top != token_id}
    return {
        str(listed): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": None if names is None else names.text(listed),
        }
        for listed, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

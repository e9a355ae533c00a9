"""Computes the output that a client should receive, from the hash model and independently of the code under test.

Tokens come from `hash_worker.expected_output`. Their text is their bytes, joined and decoded as UTF-8, up to the first
stop string or the end token. Only the masks of a grammar come from the code under test, so the text of a structured
output is also matched with a pattern.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.proto.sampling_params import Grammar, SamplingParams
from onward.sim.hash_worker import FIRST_MODEL, expected_output
from onward.sim.scenario import SimRequest
from onward.sim.vocabulary import END_ID, NUM_SAMPLED_IDS, grammars, token_bytes


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """A structured output that simulated clients request: the fields that they send, the grammar, and a pattern for the
    complete text. The pattern does not depend on the code under test."""

    fields: dict[str, Any]
    grammar: Grammar
    pattern: str

    def is_satisfied_by(self, text: str) -> bool:
        return re.fullmatch(self.pattern, text, re.DOTALL) is not None


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _source(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_WORDS = ["abc", "ab the sea", "dead 🌊", "café", "日本"]
_STRING = {"type": "string", "minLength": 2, "maxLength": 9}
_OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "日": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    },
    "required": ["a", "日"],
    "additionalProperties": False,
}
_CONSTANTS = {"enum": ["face", "a 日", "dead beef"]}
_LARK = 'start: line+ "\\n"\nline: " sea" | " the" /[a-f]{1,3}/'

STRUCTURES: dict[str, OutputStructure] = {
    "regex": OutputStructure(
        {"guided_regex": "[a-f]{3,9}( sea|日|é)*🌊"},
        Grammar("regex", "[a-f]{3,9}( sea|日|é)*🌊"),
        "[a-f]{3,9}( sea|日|é)*🌊",
    ),
    "open-regex": OutputStructure({"guided_regex": "(ab|日|é)+"}, Grammar("regex", "(ab|日|é)+"), "(ab|日|é)+"),
    "choice": OutputStructure(
        {"guided_choice": _WORDS}, Grammar("choice", _source(_WORDS)), "|".join(re.escape(word) for word in _WORDS)
    ),
    # Complete with the first token, whichever it is.
    "one": OutputStructure({"guided_choice": ["a", "b", "c"]}, Grammar("choice", _source(["a", "b", "c"])), "[abc]"),
    # A JSON string of plain and escaped characters.
    "json": OutputStructure(
        _json(_STRING),
        Grammar("json_schema", _source(_STRING)),
        r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4})){2,}"',
    ),
    "object": OutputStructure(
        _json(_OBJECT),
        Grammar("json_schema", _source(_OBJECT)),
        r'\{"a": [0-9]{1,2}, "日": \[((true|false)(, (true|false))?)?\]\}',
    ),
    "enum": OutputStructure(_json(_CONSTANTS), Grammar("json_schema", _source(_CONSTANTS)), '"(face|a 日|dead beef)"'),
    "lark": OutputStructure({"guided_grammar": _LARK}, Grammar("grammar", _LARK), "( sea| the[a-f]{1,3})+\n"),
}


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """One choice of an undisturbed response."""

    token_ids: list[int]
    text: str
    finish_reason: str


def expected_choice(
    request: SimRequest, prompt: Sequence[int], seed: int, index: int, model: str = FIRST_MODEL
) -> ExpectedChoice:
    """Returns the expected output of one choice, if this model answers."""
    sampling = SamplingParams(
        seed=seed,
        choice_index=index,
        temperature=request.temperature,
        min_tokens=request.min_tokens,
        end_token_ids=() if request.ignore_eos else (END_ID,),
        presence_penalty=request.presence_penalty,
        grammar=STRUCTURES[request.structure].grammar if request.structure else None,
    )
    matcher = None if sampling.grammar is None else grammars().matcher(sampling.grammar)
    token_ids = expected_output(prompt, sampling, request.max_tokens, NUM_SAMPLED_IDS, matcher, model)
    stopped_at = _stop(token_ids, request)
    if stopped_at is not None:
        num_tokens, text = stopped_at
        return ExpectedChoice(token_ids[:num_tokens], text, "stop")
    has_ended = (token_ids[-1] == END_ID and not request.ignore_eos) or (matcher is not None and matcher.done)
    text = decode_text(token_ids)
    if has_ended and request.structure:
        assert STRUCTURES[request.structure].is_satisfied_by(text), f"{text!r} is no {request.structure}"
    return ExpectedChoice(token_ids, text, "stop" if has_ended else "length")


def decode_text(token_ids: Sequence[int]) -> str:
    return b"".join(token_bytes()[token_id] for token_id in token_ids).decode("utf-8", "replace")


def shown_text(token_ids: Sequence[int], request: SimRequest) -> list[str]:
    """Returns the texts that a response may show if it is cut after these tokens. They contain no incomplete character.
    They may lack some last characters, because a stop string may begin there."""
    text = _complete(b"".join(token_bytes()[token_id] for token_id in token_ids))
    num_held = max((len(stop) for stop in request.stop or ()), default=0)
    return [text[: len(text) - held] for held in range(min(num_held, len(text)) + 1)]


def _stop(token_ids: Sequence[int], request: SimRequest) -> tuple[int, str] | None:
    """Returns the number of tokens at which the first stop string is complete, and the text before it, or None."""
    if not request.stop:
        return None
    data, before = b"", ""
    for num_tokens, token_id in enumerate(token_ids, 1):
        if token_id == END_ID and not request.ignore_eos:
            return None
        data += token_bytes()[token_id]
        text = _complete(data)
        for end in range(len(before) + 1, len(text) + 1):
            found = [stop for stop in request.stop if text[:end].endswith(stop)]
            if found and num_tokens >= request.min_tokens:
                return num_tokens, text[: end - max(map(len, found))]
        before = text
    return None


def _complete(data: bytes) -> str:
    """Decodes the bytes without an incomplete character at their end."""
    for num_cut in range(min(4, len(data) + 1)):
        tail = data[len(data) - num_cut :]
        if num_cut and _begins_character(tail):
            return data[: len(data) - num_cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _begins_character(tail: bytes) -> bool:
    """Returns whether the bytes are the first ones of a character, and not all of them."""
    try:
        tail.decode("utf-8")
    except UnicodeDecodeError as fault:
        return fault.reason == "unexpected end of data" and fault.start == 0
    return False

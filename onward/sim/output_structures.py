"""What simulated clients ask answers to look like: the fields that they send, the grammar, and what satisfies it.

The last is said once more in other words, by none of the code under test.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from onward.proto.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class OutputStructure:
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
    # Complete with the first token, whoever draws it.
    "one": OutputStructure({"guided_choice": ["a", "b", "c"]}, Grammar("choice", _source(["a", "b", "c"])), "[abc]"),
    # A JSON string: of plain characters, or of those that are written with a backslash.
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

"""Strings that a tokenizer is compared with its reference over: all planes of Unicode, any bytes, special tokens, runs."""

import random
from collections.abc import Iterable, Sequence

NUM_STRINGS = 10_000
_WORDS = (
    *(
        "the",
        "The",
        "fox",
        "jumps",
        "over",
        "is",
        "isn't",
        "they've",
        "WE'LL",
        "I'm",
        "he'D",
        "HTTPServer",
        "camelCase",
    ),
    *(
        "12",
        "345",
        "1984",
        "31415926",
        "½",
        "²",
        "٣٤",
        "Ⅷ",
        "def",
        "return",
        "class",
        "...",
        "!!!",
        "---",
        "==",
        "()",
        "{}",
    ),
    *(
        "[]",
        "<b>",
        "https://example.org/a?b=c",
        "naïve",
        "café",
        "Größe",
        "señor",
        "Ελλάδα",
        "Москва",
        "日本語",
        "です",
    ),
    *(
        "中文",
        "你好",
        "한국어",
        "👍🏽",
        "👨\u200d👩\u200d👧\u200d👦",
        "🎉",
        "aaa",
        "aaaa",
        "banana",
        "ananas",
        "e\u0301",
        "Å",
        "ﬁ",
    ),
    *("ſ", "'ſ", "İ", "ß", "ά", "ǅ", "<0x41>", "<0xFF>", "\u200d", "\ufeff", "\u00ad"),
)
_SPACES = (
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        " \n",
        "\n  ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "\x0b",
        "\x0c",
    ),
    *(" " * 17, "\n" * 9, "\t" * 5),
)
_REPEATED = "abn aeo. 0é日"


def reference_strings(special_tokens: Sequence[str] = (), *, seed: int = 0, marks: bool = False) -> list[str]:
    """The same strings for the same arguments. `marks`: SentencePiece's mark for a space among them, which decoding cannot
    tell from a space."""
    chance = random.Random(seed)
    strings = [_string(chance, special_tokens, _REPEATED + "▁" * marks) for _ in range(NUM_STRINGS)]
    return strings if marks else [string.replace("▁", "_") for string in strings]


def _string(chance: random.Random, special_tokens: Sequence[str], repeated: str) -> str:
    parts: list[str] = []
    for _ in range(chance.randint(0, 14)):
        kind = chance.random()
        if kind < 0.15 and special_tokens:
            parts.append(chance.choice(special_tokens))
        elif kind < 0.4:
            parts.append(chance.choice(("", " ")) + chance.choice(_WORDS))
        elif kind < 0.55:
            parts.append(chance.choice(_SPACES))
        elif kind < 0.75:
            parts += [_character(chance) for _ in range(chance.randint(1, 5))]
        elif kind < 0.85:
            parts.append(chance.randbytes(chance.randint(1, 8)).decode(chance.choice(("latin-1", "utf-8")), "replace"))
        else:
            parts.append(chance.choice(repeated) * chance.randint(1, 12))
    return "".join(parts)


def _character(chance: random.Random) -> str:
    """Returns a character of any plane, assigned or not; half of them from the first."""
    while True:
        plane = chance.choice((0, chance.randint(0, 16)))
        code = (plane << 16) + chance.randint(0, 0xFFFF)
        if not 0xD800 <= code <= 0xDFFF:
            return chr(code)


def planes_of(strings: Iterable[str]) -> set[int]:
    return {ord(character) >> 16 for string in strings for character in string}

"""The value of `--speculative`: the proposer, and the maximum number of draft tokens."""

from typing import Literal, cast, get_args

import msgspec

from onward.errors import StartupError

ProposerKind = Literal["ngram", "draft", "eagle"]

MAX_DRAFT_TOKENS = 16
"""More are never right, and each takes a row of the step."""

_FORMS = "ngram:N, draft:PATH:N or eagle:PATH:N"


class SpeculativeConfig(msgspec.Struct, frozen=True):
    kind: ProposerKind
    num_draft_tokens: int
    """At most, for each slot and step."""
    path: str = ""
    """Path of the draft model; empty for n-grams."""


def parse_speculative(text: str) -> SpeculativeConfig:
    """Parses the flag's value. The path is the text between the first and the last colon, so it may contain colons. Raises
    `StartupError` for an invalid value."""
    kind, _, rest = text.partition(":")
    path, _, number = rest.rpartition(":")
    if kind not in get_args(ProposerKind):
        raise StartupError(f"--speculative {text}: {kind or 'nothing'} is not a proposer; give {_FORMS}")
    if not (number.isascii() and number.isdecimal()) or not 1 <= int(number) <= MAX_DRAFT_TOKENS:
        raise StartupError(f"--speculative {text}: the number of drafts must be 1 to {MAX_DRAFT_TOKENS}; say {_FORMS}")
    if bool(path) != (kind != "ngram"):
        wanted = "takes no path" if kind == "ngram" else "needs the path of a model"
        raise StartupError(f"--speculative {text}: {kind} {wanted}; say {_FORMS}")
    return SpeculativeConfig(cast(ProposerKind, kind), int(number), path)


def num_draft_tokens_of(text: str | None) -> int:
    return 0 if text is None else parse_speculative(text).num_draft_tokens

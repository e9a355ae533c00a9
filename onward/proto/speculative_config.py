"""What `--speculative` says: who drafts, and how many tokens at most."""

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
    """Of the model that drafts; the n-grams need none."""


def parse_speculative(text: str) -> SpeculativeConfig:
    """The flag's value. The path is what lies between the first colon and the last, so it may have some of its own."""
    kind, _, rest = text.partition(":")
    path, _, number = rest.rpartition(":")
    if kind not in get_args(ProposerKind):
        raise StartupError(f"--speculative {text}: {kind or 'nothing'} is no proposer; say {_FORMS}")
    if not (number.isascii() and number.isdecimal()) or not 1 <= int(number) <= MAX_DRAFT_TOKENS:
        raise StartupError(f"--speculative {text}: the number of drafts must be 1 to {MAX_DRAFT_TOKENS}; say {_FORMS}")
    if bool(path) != (kind != "ngram"):
        wanted = "takes no path" if kind == "ngram" else "needs the path of a model"
        raise StartupError(f"--speculative {text}: {kind} {wanted}; say {_FORMS}")
    return SpeculativeConfig(cast(ProposerKind, kind), int(number), path)


def num_draft_tokens_of(text: str | None) -> int:
    return 0 if text is None else parse_speculative(text).num_draft_tokens

"""How the next token of a request is chosen. A function of this and of the tokens so far, and of nothing else."""

from typing import Literal

import msgspec

from onward.config import Pooling
from onward.proto.field_types import Bias, Count, Factor, UnitInterval, Word64
from onward.proto.reasoning_params import ReasoningParams

MAX_GRAMMAR_BYTES = 1 << 17
"""Size of a grammar's source in UTF-8, which is part of every assignment."""
MAX_BAD_WORD_TOKENS = 8192
"""Tokens of all bad words together, which are part of every assignment too."""
MAX_ALLOWED_TOKEN_IDS = 4096
"""Tokens that a request may list as the only ones, which are part of every assignment too."""

_LEAST_TEMPERATURE = 1e-5
"""The least one that divides logits without overflowing float32."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Constrains an output. Plain data, so that it can be sent with the request."""

    kind: GrammarKind
    source: str = ""
    """The schema, tags or list of choices as JSON; the regular expression; the grammar in Lark's form or as GBNF."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seed: Word64
    """Fixed by the outermost layer before the first attempt, so that every attempt draws the same noise."""
    choice_index: Count = 0
    """Which of a request's `n` answers this is. Noise is keyed by (seed, choice, position)."""
    temperature: Factor = 1.0
    """0 means greedy."""
    top_k: Count = 0
    """0 means no limit."""
    top_p: UnitInterval = 1.0
    min_p: UnitInterval = 0.0
    max_tokens: Count | None = None
    """Length of the whole output, tokens of earlier attempts included. None: what model and pool allow."""
    min_tokens: Count = 0
    """No end token can be sampled before this position."""
    end_token_ids: tuple[Count, ...] = ()
    """Tokens that end the output: the model's eos (unless `ignore_eos`) and the request's `stop_token_ids`."""
    presence_penalty: Bias = 0.0
    """Subtracted from the logit of every token that the output already has."""
    frequency_penalty: Bias = 0.0
    """Subtracted once for each time the output already has the token."""
    repetition_penalty: Factor = 1.0
    """Divides positive logits, multiplies negative ones, of every token that prompt or output already has."""
    logit_bias: tuple[tuple[Count, Bias], ...] = ()
    """(token id, bias), added to the model's logits."""
    bad_words: tuple[tuple[Count, ...], ...] = ()
    """Token sequences that the output never completes."""
    logprobs: Count | None = None
    """How many of the likeliest tokens to report beside each sampled one; None: no logprobs at all."""
    prompt_logprobs: Count | None = None
    """The same for the prompt's tokens, with the first delta."""
    pooling: Pooling | None = None
    """Instead of tokens, one vector of the prompt is wanted. Nothing is drawn."""
    grammar: Grammar | None = None
    """Tokens that it does not allow are never drawn, and the output ends where nothing can follow."""
    reasoning: ReasoningParams | None = None
    """Thinking is no part of what the grammar is about, and ends within its budget."""
    allowed_token_ids: tuple[Count, ...] = ()
    """No other tokens are sampled. Empty: all of the vocabulary."""


def clamp_temperature(asked: float) -> float:
    """Returns a request's temperature as kernels can use it. A value too small to divide logits in float32 becomes 0,
    which is greedy."""
    return 0.0 if asked < _LEAST_TEMPERATURE else asked

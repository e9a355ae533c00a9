"""Sampling options of `onward.LLM`, checked when they are created."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onward.errors import InvalidRequest
from onward.proto.sampling_params import Grammar, SamplingParams, clamp_temperature
from onward.text.bad_words import check_bad_words
from onward.text.stop_strings import check_stop_strings

MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling options, with the names and meanings of the HTTP API's fields. Equal options with a seed give equal
    outputs, in any batch."""

    max_tokens: int | None = None
    """None: until the model ends its answer, or the context is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """None: a random seed for each request."""
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Penalty of tokens that the output already has, applied once for each token."""
    frequency_penalty: float = 0.0
    """Penalty of tokens that the output already has, applied once for each occurrence."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that the prompt or the output already has. A value below 1 favours them."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Bias by token id, between -100 (never) and 100 (always)."""
    bad_words: Sequence[str] = ()
    """Words that the output must not contain."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each token of the output. None: no logprobs."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the tokens of the prompt."""
    grammar: Grammar | None = None
    """Constrains the output. A grammar that cannot be used, or that costs too much, ends its request with an error."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0, 2)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise _invalid("top_p", "must be above 0 (for greedy decoding use temperature 0)")
        _check_number("min_p", self.min_p, 0, 1)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0:
            raise _invalid("repetition_penalty", "must be above 0 (1 is no penalty)")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_whole(name, value, 0, MAX_LOGPROBS)
        if not isinstance(self.grammar, Grammar | None):
            raise _invalid("grammar", f"must be an onward.Grammar, got {self.grammar!r:.80}")
        self._check_stops()
        self._check_logit_bias()
        if isinstance(self.bad_words, str):
            raise _invalid("bad_words", f"must be a list of words, got {self.bad_words!r:.80}")
        check_bad_words(self.bad_words)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_sampling(self, eos_token_ids: Sequence[int], bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """Returns the options in the form that the engine takes, with a random seed if none is set. `bad_words` are the
        words as token sequences, which only the model's tokenizer can determine."""
        end_token_ids = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        return SamplingParams(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            temperature=clamp_temperature(float(self.temperature)),
            top_k=self.top_k,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            end_token_ids=tuple(sorted(end_token_ids)),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=tuple(sorted((token_id, float(bias)) for token_id, bias in self.logit_bias.items())),
            bad_words=bad_words,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.grammar,
        )

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise _invalid("logit_bias", f"must be a mapping from at most {MAX_LOGIT_BIASES} token ids to biases")
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id, 0, 2**31 - 1)
            _check_number("logit_bias", bias, -100, 100)

    def _check_stops(self) -> None:
        for string in self.stop_strings:
            if not isinstance(string, str):
                raise _invalid("stop", f"must be a string or several, got {string!r:.80}")
        check_stop_strings(self.stop_strings)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _invalid("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, 2**31 - 1)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    # The comparison is written so that NaN fails it.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise _invalid(name, f"must be a number between {low} and {high}, got {value!r:.80}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _invalid(name, f"must be a whole number between {low} and {high}, got {value!r:.80}")


def _invalid(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {problem}", param=name)

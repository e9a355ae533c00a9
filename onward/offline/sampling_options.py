"""How `onward.LLM` is told to choose tokens: what a person may say, checked here and nowhere behind."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from onward.errors import InvalidRequest
from onward.proto.sampling import Sampling
from onward.text.stop_strings import check_stop_strings

MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The names and meanings of the HTTP API's fields. Equal options with a seed give equal outputs, in any batch."""

    max_tokens: int | None = None
    """None: until the model ends its answer, or the context is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """None: another one each time."""
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0, 2)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise _wrong("top_p", "must be above 0 (for greedy decoding use temperature 0)")
        _check_number("min_p", self.min_p, 0, 1)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self._check_stops()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_sampling(self, eos_token_ids: Sequence[int]) -> Sampling:
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        return Sampling(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            temperature=float(self.temperature),
            top_k=self.top_k,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            end_token_ids=tuple(sorted(ends)),
        )

    def _check_stops(self) -> None:
        for string in self.stop_strings:
            if not isinstance(string, str):
                raise _wrong("stop", f"must be a string or several, got {string!r:.80}")
        check_stop_strings(self.stop_strings)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _wrong("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, 2**31 - 1)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    # Written so that NaN fails it.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(name, f"must be a number between {low} and {high}, got {value!r:.80}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(name, f"must be a whole number between {low} and {high}, got {value!r:.80}")


def _wrong(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {problem}", param=name)

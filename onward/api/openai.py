"""OpenAI's requests as structs, and every rule about their fields. Nothing behind this module checks a value again.

Fields that we know but do not support are refused unless they say what we do anyway; fields that nobody knows are
ignored and counted. An error names the path of the field.
"""

import re
from typing import Any, TypeVar

import msgspec

from onward.api.ledger import RESCHEDULE
from onward.api.structured import StructuredFields
from onward.errors import NotFound
from onward.text.bad_words import check_bad_words
from onward.text.prompt_tokens import ChatMessage, ContentPart
from onward.web.body import decode, decode_fields, plain, wrong

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_LENGTH = 256
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_REPETITION_PENALTY = 10
FINISH_REASONS = ("stop", "length", RESCHEDULE)
"""Those that an answer can have."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class GenerationRequest(StructuredFields, frozen=True, kw_only=True):
    """What the endpoints that generate share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    generated_token_ids: list[int | list[int]] | None = None
    generated_finish_reasons: list[str | None] | None = None
    """Of an earlier answer, one per choice: a choice that has ended there is not run again."""
    rescore_from: int | list[int] | None = None
    """A position of the output, or one per choice: from there on the given tokens' logprobs are told again."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each one; None: no logprobs."""
        return None

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def generated(self) -> list[list[int]]:
        """The tokens so far, one list per choice."""
        given = self.generated_token_ids or []
        if self.num_choices == 1:
            return [[one for one in given if isinstance(one, int)]]
        return [one for one in given if isinstance(one, list)] or [[] for _ in range(self.num_choices)]

    def told_reasons(self) -> list[str | None]:
        """How each choice has ended in an earlier answer, if it has."""
        given = self.generated_finish_reasons or [None] * self.num_choices
        return [None if reason == RESCHEDULE else reason for reason in given]

    def rescored_from(self) -> list[int | None]:
        """For each choice the first position to be scored again, if there is one."""
        given = self.rescore_from
        starts = given if isinstance(given, list) else [given] * self.num_choices
        lengths = map(len, self.generated())
        return [None if start == length else start for start, length in zip(starts, lengths, strict=True)]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenRequest(GenerationRequest, frozen=True, kw_only=True):
    """Our own: token ids in, token ids out."""

    prompt_token_ids: list[int]
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Bounds(msgspec.Struct, frozen=True):
    """What the server's own configuration says about requests."""

    model: str
    vocab_size: int
    max_choices: int


RequestT = TypeVar("RequestT", bound=GenerationRequest)

# Known fields that we do not act on, each with the values that ask for nothing.
_INERT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
# Labels for OpenAI's own books; they change nothing about an answer.
_LABELS = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_token_decoder = msgspec.json.Decoder(TokenRequest)


def decode_chat(body: bytes, bounds: Bounds) -> tuple[ChatRequest, int]:
    """The request, and how many of its fields nobody knows."""
    request, num_unknown = _decode(body, _chat_decoder, ChatRequest, bounds)
    _check_messages(request.messages)
    _check_at_least("max_completion_tokens", request.max_completion_tokens, 1)
    _check_number("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "only allowed with logprobs: true")
    return request, num_unknown


def decode_completion(body: bytes, bounds: Bounds) -> tuple[CompletionRequest, int]:
    request, num_unknown = _decode(body, _completion_decoder, CompletionRequest, bounds)
    _check_number("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if isinstance(request.prompt, list):
        _check_prompt_token_ids(request.prompt, bounds)
    return request, num_unknown


def decode_tokens(body: bytes, bounds: Bounds) -> tuple[TokenRequest, int]:
    request, num_unknown = _decode(body, _token_decoder, TokenRequest, bounds)
    _check_number("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if not request.prompt_token_ids:
        raise wrong("prompt_token_ids", "must not be empty")
    check_token_ids("prompt_token_ids", request.prompt_token_ids, bounds)
    return request, num_unknown


def _decode(
    body: bytes, decoder: "msgspec.json.Decoder[RequestT]", struct: type[RequestT], bounds: Bounds
) -> tuple[RequestT, int]:
    fields = decode_fields(body)
    for name in (fields.keys() & _INERT.keys()).difference(struct.__struct_fields__):
        _refuse_unless_inert(name, plain(fields[name]))
    request = decode(body, decoder)
    if request.model != bounds.model:
        raise NotFound(
            f"model: {_short(request.model)} is not served here; {bounds.model!r} is",
            code="model_not_found",
            param="model",
        )
    _check_shared(request, bounds)
    known = _INERT.keys() | _LABELS | set(struct.__struct_fields__)
    return request, len(fields.keys() - known)


def _refuse_unless_inert(name: str, value: Any) -> None:
    # `False == 0`, so the type is compared too, except between the two kinds of number.
    for inert in _INERT[name]:
        if value == inert and isinstance(value, bool) == isinstance(inert, bool):
            return
    if value is not None:
        raise wrong(name, "not supported by this server")


def _check_shared(request: GenerationRequest, bounds: Bounds) -> None:
    _check_at_least("max_tokens", request.max_tokens, 1)
    _check_number("temperature", request.temperature, 0, 2)
    _check_number("top_p", request.top_p, 0, 1)
    if request.top_p == 0:
        raise wrong("top_p", "must be above 0 (for greedy decoding use temperature 0)")
    _check_number("min_p", request.min_p, 0, 1)
    _check_number("top_k", request.top_k, -1, 2**31 - 1)
    _check_number("presence_penalty", request.presence_penalty, -2, 2)
    _check_number("frequency_penalty", request.frequency_penalty, -2, 2)
    _check_number("repetition_penalty", request.repetition_penalty, 0, MAX_REPETITION_PENALTY)
    if request.repetition_penalty == 0:
        raise wrong("repetition_penalty", "must be above 0 (1 is no penalty)")
    _check_number("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_number("seed", request.seed, -(2**63), 2**63 - 1)
    _check_number("priority", request.priority, -(2**31), 2**31 - 1)
    _check_number("deadline_ms", request.deadline_ms, 1, MAX_DEADLINE_MS)
    _check_number("n", request.n, 1, bounds.max_choices)
    _check_at_least("min_tokens", request.min_tokens, 0)
    limit = request.output_limit
    if limit is not None and request.min_tokens is not None and request.min_tokens > limit:
        raise wrong("min_tokens", f"must not exceed max_tokens ({limit}), got {request.min_tokens}")
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "only allowed with stream: true")
    if request.cache_salt is not None and len(request.cache_salt) > MAX_CACHE_SALT_LENGTH:
        raise wrong("cache_salt", f"at most {MAX_CACHE_SALT_LENGTH} characters")
    _check_logit_bias(request.logit_bias or {}, bounds)
    check_bad_words(request.bad_words or [])
    _check_stops(request, bounds)
    _check_generated(request, bounds)
    _check_finish_reasons(request)
    _check_rescore_from(request)


def _check_logit_bias(biases: dict[str, float], bounds: Bounds) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        raise wrong("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    for key, bias in biases.items():
        path = f"logit_bias[{_short(key)}]"
        # One way to write each id, so that none can be given twice.
        if not (_TOKEN_ID.fullmatch(key) and int(key) < bounds.vocab_size):
            raise wrong(path, f"must be a token id below {bounds.vocab_size} (the vocabulary), written as a number")
        _check_number(path, bias, -100, 100)


def _check_stops(request: GenerationRequest, bounds: Bounds) -> None:
    strings = request.stop_strings()
    if len(strings) > MAX_STOP_STRINGS:
        raise wrong("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            path = "stop" if isinstance(request.stop, str) else f"stop[{index}]"
            raise wrong(path, f"must have 1 to {MAX_STOP_LENGTH} characters, got {len(string)}")
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise wrong("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    check_token_ids("stop_token_ids", ids, bounds)


def _check_generated(request: GenerationRequest, bounds: Bounds) -> None:
    given, path = request.generated_token_ids, "generated_token_ids"
    if given is None:
        return
    if request.num_choices == 1:
        check_token_ids(path, given, bounds)
        return
    if len(given) != request.num_choices:
        raise wrong(path, f"must be one list per choice ({request.num_choices}), got {len(given)}")
    for index, one in enumerate(given):
        if isinstance(one, int):
            raise wrong(f"{path}[{index}]", "must be a list of token ids, as n is more than 1")
        check_token_ids(f"{path}[{index}]", one, bounds)


def _check_finish_reasons(request: GenerationRequest) -> None:
    given, path = request.generated_finish_reasons, "generated_finish_reasons"
    if given is None:
        return
    if request.generated_token_ids is None:
        raise wrong(path, "only allowed with generated_token_ids")
    if len(given) != request.num_choices:
        raise wrong(path, f"must be one per choice ({request.num_choices}), got {len(given)}")
    for index, reason in enumerate(given):
        if reason is not None and reason not in FINISH_REASONS:
            allowed = ", ".join(FINISH_REASONS)
            raise wrong(f"{path}[{index}]", f"must be null or one of {allowed}, got {_short(reason)}")


def _check_rescore_from(request: GenerationRequest) -> None:
    given, path = request.rescore_from, "rescore_from"
    if given is None:
        return
    if request.generated_token_ids is None or request.num_logprobs is None:
        raise wrong(path, "only allowed with generated_token_ids and logprobs")
    if isinstance(given, list) and len(given) != request.num_choices:
        raise wrong(path, f"must be one position, or one per choice ({request.num_choices}), got {len(given)}")
    for index, token_ids in enumerate(request.generated()):
        each, start = (f"{path}[{index}]", given[index]) if isinstance(given, list) else (path, given)
        _check_number(each, start, 0, len(token_ids))


def _check_prompt_token_ids(prompt: list[Any], bounds: Bounds) -> None:
    if not prompt:
        raise wrong("prompt", "must not be empty")
    for index, one in enumerate(prompt):
        if isinstance(one, (str, list)):
            raise wrong(f"prompt[{index}]", "lists of prompts are not supported; send one prompt per request")
    check_token_ids("prompt", prompt, bounds)


def check_token_ids(path: str, ids: list[Any], bounds: Bounds) -> None:
    for index, one in enumerate(ids):
        if not isinstance(one, int) or isinstance(one, bool):
            raise wrong(f"{path}[{index}]", f"must be a token id, got {_short(one)}")
        if not 0 <= one < bounds.vocab_size:
            raise wrong(f"{path}[{index}]", f"must be below {bounds.vocab_size} (the vocabulary), got {one}")


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise wrong("messages", "must not be empty")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.tool_calls:
            raise wrong(f"{path}.tool_calls", "not supported by this server")
        if message.content is None:
            raise wrong(f"{path}.content", "is required: a string or a list of text parts")
        if isinstance(message.content, list):
            _check_parts(f"{path}.content", message.content)


def _check_parts(path: str, parts: list[ContentPart]) -> None:
    if not parts:
        raise wrong(path, "must not be empty")
    for index, part in enumerate(parts):
        if part.type != "text":
            raise wrong(f"{path}[{index}].type", f"only 'text' is supported, got {_short(part.type)}")
        if part.text is None:
            raise wrong(f"{path}[{index}].text", "is required")


def _check_number(name: str, value: float | None, low: float, high: float) -> None:
    # Written so that NaN fails it.
    if value is not None and not low <= value <= high:
        raise wrong(name, f"must be between {low} and {high}, got {_short(value)}")


def _check_at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise wrong(name, f"must be at least {low}, got {_short(value)}")


def _short(value: object) -> str:
    """A client's value, for an error message: never the whole of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

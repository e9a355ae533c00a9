"""Every rule about the fields of a request. No later code checks a value again. An error names the path of the field."""

import re
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from onward.api.requests.schemas import (
    CALL_REASONS,
    WHAT_FITS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
    TextGenerationRequest,
    ValidationContext,
)
from onward.proto.cursor import MAX_CHOICES
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.proto.sampling_params import MAX_ALLOWED_TOKEN_IDS
from onward.proto.speculative_config import MAX_DRAFT_TOKENS
from onward.text.bad_words import check_bad_words
from onward.text.prompt_tokenizer import ChatMessage, ContentPart
from onward.text.stop_patterns import StopPatterns
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import check_tool_messages

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_LENGTH = 256
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_REPETITION_PENALTY = 10
MAX_THINKING_BUDGET = 1 << 20
FINISH_REASONS = ("stop", "length", *CALL_REASONS, PD_RESCHEDULE, ABORT)
"""The finish reasons that a response can have."""

FIELD_RANGES: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "truncate_prompt_tokens": {"minimum": WHAT_FITS},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": MAX_REPETITION_PENALTY},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "thinking_budget": {"minimum": 0, "maximum": MAX_THINKING_BUDGET},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "deadline_ms": {"minimum": 1, "maximum": MAX_DEADLINE_MS},
    "cache_salt": {"maxLength": MAX_CACHE_SALT_LENGTH},
}
"""The bounds of fields in JSON Schema keywords. `check_ranges` checks them, and `/openapi.json` shows them."""
_ABOVE_MINIMUM = {"top_p": "for greedy decoding use temperature 0", "repetition_penalty": "1 is no penalty"}
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def check_chat(request: ChatCompletionRequest, context: ValidationContext) -> None:
    _check_shared_fields(request, context)
    if request.top_logprobs and not request.logprobs:
        raise field_error("top_logprobs", "only allowed with logprobs: true")
    if request.echo and request.truncate_prompt_tokens is not None:
        raise field_error("truncate_prompt_tokens", "not allowed with echo, which returns the whole message")
    check_chat_template(request, context)
    request.resolved_tools()  # checks its fields
    if request.prompt_token_ids is None:
        check_messages(request.messages)
    else:
        _check_exclusive("prompt_token_ids", "messages", bool(request.messages))
        if request.echo:
            raise field_error("echo", "only allowed with messages")
        check_prompt_ids("prompt_token_ids", request.prompt_token_ids, context)


class _HasTemplateFields(Protocol):
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...


def check_chat_template(request: _HasTemplateFields, context: ValidationContext) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        raise field_error("add_generation_prompt", "must not be true with continue_final_message: true")
    if request.chat_template is not None and not context.allows_client_templates:
        raise field_error(
            "chat_template", "not allowed here; the operator can allow it by --trust-request-chat-template"
        )


def check_completion(request: CompletionRequest, context: ValidationContext) -> None:
    check_number("n", request.n, 1, context.max_choices)
    check_number("best_of", request.best_of, request.num_returned, context.max_choices)
    _check_prompts(request, context)
    _check_shared_fields(request, context, () if not request.only_echoes else ("max_tokens",))
    if request.only_echoes and (request.min_tokens or request.resumed_tokens is not None):
        name = "min_tokens" if request.min_tokens else request.resumed_field
        raise field_error(name, "not allowed with max_tokens: 0, which generates nothing")
    if request.echo and request.truncate_prompt_tokens is not None:
        raise field_error("truncate_prompt_tokens", "not allowed with echo, which returns the whole prompt")
    if request.selects_best and request.stream:
        raise field_error("best_of", "must be n in a stream: which choices are the best is known only at the end")
    if request.selects_best and request.resumed_tokens is not None:
        raise field_error("best_of", f"must be n with {request.resumed_field}")


def check_tokens(request: GenerateRequest, context: ValidationContext) -> None:
    _check_shared_fields(request, context)
    check_prompt_ids("prompt_token_ids", request.prompt_token_ids, context)


def _check_prompts(request: CompletionRequest, context: ValidationContext) -> None:
    if request.prompt_token_ids is not None:
        _check_exclusive("prompt_token_ids", "prompt", request.prompt is not None)
    elif request.prompt is None:
        raise field_error("prompt", "is required")
    prompts = request.prompts()
    num_candidates = request.num_candidates
    if len(prompts) * num_candidates > MAX_CHOICES:
        problem = f"at most {MAX_CHOICES} choices in all, got {len(prompts)} prompts of {num_candidates}"
        raise field_error(request.prompt_field, problem)
    for index, prompt in enumerate(prompts):
        path = request.prompt_path(index)
        if type(prompt) is not type(prompts[0]):
            raise field_error(path, "must be as the first one: a text, or a list of token ids")
        check_prompt(path, prompt, context)


def check_prompt(path: str, prompt: str | list[int], context: ValidationContext) -> None:
    if isinstance(prompt, list):
        check_prompt_ids(path, prompt, context)
    elif not prompt:
        raise field_error(path, "must not be empty")


def check_prompt_ids(path: str, token_ids: list[int], context: ValidationContext) -> None:
    if not token_ids:
        raise field_error(path, "must not be empty")
    check_token_ids(path, token_ids, context)


def _check_exclusive(name: str, other: str, has_other: bool) -> None:
    if has_other:
        raise field_error(name, f"stands instead of {other}, so only one of the two can be given")


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise field_error("stream_options", "only allowed with stream: true")


def _check_shared_fields(
    request: GenerationRequest, context: ValidationContext, checked_fields: Collection[str] = ()
) -> None:
    """Checks the fields that generation requests of all endpoints have, and raises an error for the first invalid one.
    `checked_fields`: fields whose range is checked already."""
    check_ranges(request, checked_fields)
    check_number("n", request.n, 1, context.max_choices)
    limit = request.max_output_tokens
    if limit is not None and request.min_tokens is not None and request.min_tokens > limit:
        field = request.output_limit_field
        raise field_error("min_tokens", f"must not exceed {field} ({limit}), got {request.min_tokens}")
    if isinstance(request, TextGenerationRequest) and request.truncate_prompt_tokens == 0:
        raise field_error("truncate_prompt_tokens", "must be at least 1, or -1 for what fits, got 0")
    _check_stream_options(request)
    _check_logit_bias(request.logit_bias or {}, context)
    check_bad_words(request.bad_words or [])
    _check_allowed_tokens(request, context)
    _check_stops(request, context)
    _check_generated(request, context)
    _check_finish_reasons(request)
    _check_rescore_from(request)
    _check_speculative(request)


def _check_speculative(request: GenerationRequest) -> None:
    """Accepts more drafts than this instance makes: another instance, which makes more, may continue the stream."""
    check_number("speculative.num_draft_tokens", request.max_drafts, 0, MAX_DRAFT_TOKENS)
    if request.return_speculative_stats and request.stream and not request.include_usage:
        raise field_error("return_speculative_stats", "in a stream only with stream_options.include_usage: true")


def _check_logit_bias(biases: dict[str, float], context: ValidationContext) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        raise field_error("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    for key, bias in biases.items():
        path = f"logit_bias[{short_repr(key)}]"
        # Each id has only one valid spelling, so that no id can be given twice.
        if not (_TOKEN_ID.fullmatch(key) and int(key) < context.vocab_size):
            raise field_error(path, f"{_token_id_rule(context)}, written as a number, got {short_repr(key)}")
        check_number(path, bias, -100, 100)


def _check_allowed_tokens(request: GenerationRequest, context: ValidationContext) -> None:
    allowed = request.allowed_token_ids
    if allowed is None:
        return
    if not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
        raise field_error("allowed_token_ids", f"must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids, got {len(allowed)}")
    check_token_ids("allowed_token_ids", allowed, context)
    if isinstance(request, ChatCompletionRequest) and request.thinking_budget is not None:
        raise field_error(
            "thinking_budget", "not allowed with allowed_token_ids, which may forbid the end of reasoning"
        )


def check_allowed_ends(request: GenerationRequest, end_token_ids: Collection[int]) -> None:
    """Refuses a request whose allowed tokens all end the output, which `min_tokens` forbids at first."""
    allowed = request.allowed_token_ids
    if request.min_tokens and allowed and set(allowed) <= set(end_token_ids):
        raise field_error("allowed_token_ids", "must have a token that does not end the output, with min_tokens")


def _check_stops(request: GenerationRequest, context: ValidationContext) -> None:
    strings = request.stop_strings()
    if len(strings) > MAX_STOP_STRINGS:
        raise field_error("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            path = "stop" if isinstance(request.stop, str) else f"stop[{index}]"
            raise field_error(path, f"must have 1 to {MAX_STOP_LENGTH} characters, got {len(string)}")
    StopPatterns(request.stop_patterns())  # checks them
    token_ids = request.stop_token_ids or []
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise field_error("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}")
    check_token_ids("stop_token_ids", token_ids, context)


def _check_generated(request: GenerationRequest, context: ValidationContext) -> None:
    resumed, path = request.resumed_tokens, request.resumed_field
    if resumed is None:
        return
    if request.completion_token_ids not in (None, resumed):
        raise field_error("completion_token_ids", "must equal generated_token_ids where a request has both")
    if request.num_choices == 1:
        check_token_ids(path, resumed, context)
        return
    if len(resumed) != request.num_choices:
        raise field_error(path, f"must be one list per choice ({request.num_choices}), got {len(resumed)}")
    for index, choice_token_ids in enumerate(resumed):
        if isinstance(choice_token_ids, int):
            raise field_error(f"{path}[{index}]", "must be a list of token ids, as there are several choices")
        check_token_ids(f"{path}[{index}]", choice_token_ids, context)


def _check_finish_reasons(request: GenerationRequest) -> None:
    finish_reasons, path = request.generated_finish_reasons, "generated_finish_reasons"
    if finish_reasons is None:
        return
    if request.resumed_tokens is None:
        raise field_error(path, "only allowed with generated_token_ids")
    if len(finish_reasons) != request.num_choices:
        raise field_error(path, f"must be one per choice ({request.num_choices}), got {len(finish_reasons)}")
    for index, reason in enumerate(finish_reasons):
        if reason is not None and reason not in FINISH_REASONS:
            allowed = ", ".join(FINISH_REASONS)
            raise field_error(f"{path}[{index}]", f"must be null or one of {allowed}, got {short_repr(reason)}")


def _check_rescore_from(request: GenerationRequest) -> None:
    rescore_from, path = request.rescore_from, "rescore_from"
    if rescore_from is None:
        return
    if request.resumed_tokens is None or request.num_logprobs is None:
        raise field_error(path, "only allowed with generated_token_ids and logprobs")
    if isinstance(rescore_from, list) and len(rescore_from) != request.num_choices:
        raise field_error(
            path, f"must be one position, or one per choice ({request.num_choices}), got {len(rescore_from)}"
        )
    for index, token_ids in enumerate(request.prior_token_ids()):
        field_path, start = (
            (f"{path}[{index}]", rescore_from[index]) if isinstance(rescore_from, list) else (path, rescore_from)
        )
        check_number(field_path, start, 0, len(token_ids))


def check_token_ids(path: str, token_ids: list[Any], context: ValidationContext) -> None:
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < context.vocab_size:
            raise field_error(f"{path}[{index}]", f"{_token_id_rule(context)}, got {short_repr(token_id)}")


def _token_id_rule(context: ValidationContext) -> str:
    return f"must be a token id between 0 and {context.vocab_size - 1} (the vocabulary)"


def check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise field_error("messages", "must not be empty")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if _ROLE.fullmatch(message.role) is None:
            raise field_error(
                f"{path}.role", f"must be 1 to 64 letters, digits, _, - or ., got {short_repr(message.role)}"
            )
        if isinstance(message.content, list):
            _check_parts(f"{path}.content", message.content)
    check_tool_messages(messages)


def _check_parts(path: str, parts: list[ContentPart]) -> None:
    if not parts:
        raise field_error(path, "must not be empty")
    for index, part in enumerate(parts):
        if part.type != "text":
            raise field_error(f"{path}[{index}].type", f"only 'text' is supported, got {short_repr(part.type)}")
        if part.text is None:
            raise field_error(f"{path}[{index}].text", "is required")


def check_ranges(request: msgspec.Struct, checked_fields: Collection[str] = ()) -> None:
    for name in request.__struct_fields__:
        if name in FIELD_RANGES and name not in checked_fields:
            check_range(name, getattr(request, name))


def check_range(name: str, value: Any) -> None:
    """Checks a field against `FIELD_RANGES`. Booleans are not checked, because a chat's `logprobs` is a boolean."""
    bounds = FIELD_RANGES[name]
    if value is None or isinstance(value, bool):
        return
    if "maxLength" in bounds:
        if len(value) > bounds["maxLength"]:
            raise field_error(name, f"at most {bounds['maxLength']} characters")
    elif "maximum" not in bounds:
        if value < bounds["minimum"]:
            raise field_error(name, f"must be at least {bounds['minimum']}, got {short_repr(value)}")
    else:
        low = bounds["minimum"] if "minimum" in bounds else bounds["exclusiveMinimum"]
        check_number(name, value, low, bounds["maximum"])
        if "exclusiveMinimum" in bounds and value == low:
            raise field_error(name, f"must be above {low} ({_ABOVE_MINIMUM[name]})")


def check_number(name: str, value: float | None, low: float, high: float) -> None:
    # NaN fails this comparison.
    if value is not None and not low <= value <= high:
        raise field_error(name, f"must be between {low} and {high}, got {short_repr(value)}")

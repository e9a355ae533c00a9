"""Request fields of other servers that this server does not act on, and the names of fields that it does not know.

A field that would change the response is refused unless its value asks for what the server does anyway. A field that would
not is accepted. Any other name is unknown: it is reported to the client and to the log, or refused with `--strict-fields`.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from onward import log
from onward.obs.metrics import Counter
from onward.proto.router import IGNORED_FIELDS_HEADER
from onward.web.json_body import decode_raw, field_error

MAX_NAMED = 16
MAX_NAME_LENGTH = 64

# Fields that are refused, each with the values that are tolerated, because they have no effect. `null` never has one.
_NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    # OpenAI
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
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "instructions": ("",),
    "input": (),
    "max_output_tokens": (),
    # vLLM
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False, True),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "guided_json_object": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "watermarking": (False,),
    "repetition_detection": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "prompt_embeds": (),
    "return_token_offsets": (False,),
    # SGLang
    "no_stop_trim": (False,),
    "lora_path": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_params": ({},),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "sampling_seed": (),
    "sampling_params": ({},),
    "text": (),
    "input_ids": (),
    # llama.cpp
    "n_predict": (-1,),
    "n_probs": (0,),
    "n_keep": (0,),
    "n_indent": (0,),
    "min_keep": (0,),
    "t_max_predict_ms": (0, -1),
    "samplers": (),
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "adaptive_target": (-1,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "image_data": ([],),
    "lora": ([],),
    "reasoning_format": ("auto", "deepseek"),
    "thinking_forced_open": (False,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    # TGI
    "inputs": (),
    "parameters": ({},),
    "adapter_id": (),
    "max_new_tokens": (),
    "do_sample": (True,),
    "return_full_text": (False,),
    "stop_sequences": ([],),
    "top_n_tokens": (0,),
    "truncate": (),
    "watermark": (False,),
    "guideline": (),
    "tool_prompt": (),
    # Other servers with the same endpoints
    "system": ("", []),
    "options": ({},),
    "format": ("",),
    "think": (),
    "thinking": (),
    "enable_thinking": (),
    "reasoning": (),
    "top_a": (0,),
    "transforms": ([],),
    "nvext": ({},),
}
_SPECIAL_TOKENS = "add_special_tokens"
"""Whether the tokenizer adds its special tokens. It always does for a prompt, and for a chat the template writes them."""

_EMBEDDING_NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "truncate": (),
    "truncation": (False,),
    "truncation_side": (),
    _SPECIAL_TOKENS: (True,),
    "messages": ([],),
    "embed_dtype": ("float32",),
    "output_dtype": ("float",),
    "output_dimension": (),
    "endianness": ("native", "little"),
    "embedding_type": ("float",),
    "input_type": (),
    "task": ("embed",),
    "instruction": ("",),
    "prompt_name": (),
    "prompt": ("",),
    "late_chunking": (False,),
    "embd_normalize": (2,),
    "lora_path": (),
}

_REPLACEMENTS = {
    "thinking_token_budget": "thinking_budget",
    "enable_thinking": "chat_template_kwargs",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "guided_json_object": "response_format",
    "format": "response_format",
    "no_stop_trim": "include_stop_str_in_output",
    "repeat_penalty": "repetition_penalty",
    "n_probs": "logprobs",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "output_dimension": "dimensions",
    "input_ids": "prompt_token_ids",
    "return_tokens_as_token_ids": "return_token_ids",
}
_WHY = {"suffix": "not supported: this server continues a text, and does not fill in its middle"}

# The response is the same without them: they label a request, concern speed alone, or modify a field that is refused.
# `store` keeps responses at OpenAI, `prediction` is a draft of the response.
_IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "store",
        "prediction",
        "request_id",
        "rid",
        "session_id",
        "extra_key",
        "custom_labels",
        "cache_prompt",
        "id_slot",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
        "spaces_between_special_tokens",
        "truncation_side",
        "mirostat_tau",
        "mirostat_eta",
        "dynatemp_exponent",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "repeat_last_n",
        "adaptive_decay",
        "preserved_tokens",
    }
)


def check_field_names(fields: dict[str, msgspec.Raw], body: bytes, supported: Collection[str]) -> tuple[str, ...]:
    """Refuses fields that ask for something that this server does not do. Returns the names of unknown fields.
    `supported`: the fields that the endpoint acts on."""
    special_tokens = {_SPECIAL_TOKENS: (False,) if "messages" in supported else (True,)}
    return _unknown(fields, body, supported, _NO_EFFECT_VALUES | special_tokens)


def check_embedding_field_names(
    fields: dict[str, msgspec.Raw], body: bytes, supported: Collection[str]
) -> tuple[str, ...]:
    return _unknown(fields, body, supported, _EMBEDDING_NO_EFFECT_VALUES)


def _unknown(
    fields: dict[str, msgspec.Raw], body: bytes, supported: Collection[str], inert_values: dict[str, tuple[Any, ...]]
) -> tuple[str, ...]:
    for name in sorted((fields.keys() & inert_values.keys()).difference(supported)):
        _refuse_unless_inert(name, decode_raw(fields[name], body), inert_values[name])
    return tuple(sorted(fields.keys() - inert_values.keys() - _IGNORED_FIELDS - set(supported)))


def _refuse_unless_inert(name: str, value: Any, inert_values: tuple[Any, ...]) -> None:
    # `False == 0`, so the type is compared too, except between the two kinds of number.
    for inert_value in inert_values:
        if value == inert_value and isinstance(value, bool) == isinstance(inert_value, bool):
            return
    if value is not None:
        replacement = f"not supported by this server; use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else None
        raise field_error(name, _WHY.get(name) or replacement or "not supported by this server")


def describe_handling(name: str) -> str:
    """Returns how a field that no endpoint acts on is handled, for the table of docs/fields.md."""
    values = (_NO_EFFECT_VALUES | {_SPECIAL_TOKENS: (True,)}).get(name)
    if values is None:
        return "accepted, no effect" if name in _IGNORED_FIELDS else "unknown: reported, not read"
    allowed = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
    refused = f"refused, except {allowed}" if allowed else "refused"
    replacement = _REPLACEMENTS.get(name)
    return refused if replacement is None else f"{refused}; use `{replacement}`"


def reject_unknown_fields(names: Sequence[str]) -> None:
    """Raises `InvalidRequest` for the first unknown field."""
    if names:
        raise field_error(
            names[0][:MAX_NAME_LENGTH], "there is no such field (the server was started with --strict-fields)"
        )


def format_names(names: Sequence[str]) -> str:
    """Returns the names as a list for a header or a log line: printable, and bounded in number and length."""
    quoted = [quote(name[:MAX_NAME_LENGTH].encode("utf-8", "replace"), safe="") for name in names[:MAX_NAMED]]
    return ", ".join(quoted + ([f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []))


def ignored_fields_header(names: Sequence[str]) -> dict[str, str]:
    return {IGNORED_FIELDS_HEADER: format_names(names)} if names else {}


MAX_LOGGED = 256
"""Maximum number of names that a process logs during its life. It is bounded because clients choose the names."""

_logger = logging.getLogger(__name__)


class UnknownFieldReporter:
    """Counts the request fields that no endpoint knows, and logs each name once."""

    def __init__(self, counter: Counter, max_logged: int = MAX_LOGGED) -> None:
        self._counter = counter
        self._max_logged = max_logged
        self._logged: set[str] = set()

    def report(self, names: tuple[str, ...], path: str, request_fields: Mapping[str, str]) -> None:
        """Counts unknown fields of a request, and logs those names that this process has not logged yet.
        `request_fields`: id and label of the request, for the log."""
        if not names:
            return
        self._counter.inc(by=len(names))
        new = [name for name in names if name not in self._logged][: self._max_logged - len(self._logged)]
        if new:
            self._logged.update(new)
            _logger.warning(
                log.event(
                    "request has unknown fields",
                    fields=format_names(new),
                    path=path,
                    action="ignored",
                    **request_fields,
                )
            )

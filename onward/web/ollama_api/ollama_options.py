"""Converts the `options` of a request to the fields of OpenAI's API and of vLLM.

An option that would change the answer and has no such field is refused, unless its value asks for what the server does
anyway. Options about memory and speed have no effect. Any other name is unknown, and is reported as such; so is `num_ctx`,
since the context's length is the server's.
"""

from collections.abc import Mapping
from typing import Any

from onward.web.json_body import field_error, short_repr

FIELD_BY_OPTION: Mapping[str, str] = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
ALLOWED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "embedding_only": (False,),
    "logits_all": (False,),
    "vocab_only": (False,),
}
"""Options that are refused with any other value. `null` is always accepted."""
NO_EFFECT = frozenset(
    {
        "f16_kv",
        "low_vram",
        "main_gpu",
        "mirostat_eta",
        "mirostat_tau",
        "num_batch",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
    }
)
"""Options that do not change the answer: they concern memory or speed, or modify an option that is refused."""
REPEAT_LAST_N = "repeat_last_n"
_PENALTIES: Mapping[str, float] = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Each penalty with the value that is none."""
_NO_LIMIT = (-1, -2)
_RANDOM_SEED = -1


def option_path(name: str) -> str:
    return f"options.{name}"


def fields_of_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat or a completion. Their values are checked by the endpoint that gets them."""
    _check_refused(options)
    fields = {
        FIELD_BY_OPTION[name]: value
        for name, value in options.items()
        if name in FIELD_BY_OPTION and value is not None and not _is_default(name, value)
    }
    if fields.get("max_tokens") == 0:
        raise field_error(option_path("num_predict"), "must be at least 1, or -1 for no limit, got 0")
    return fields


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Returns the names of options that are not read, as paths in the request."""
    known = FIELD_BY_OPTION.keys() | ALLOWED_VALUES.keys() | NO_EFFECT | {REPEAT_LAST_N}
    return [option_path(name) for name in sorted(options.keys() - known)]


def _check_refused(options: Mapping[str, Any]) -> None:
    for name, allowed in ALLOWED_VALUES.items():
        value = options.get(name)
        if value is not None and not any(_equals(value, one) for one in allowed):
            raise field_error(option_path(name), f"only {allowed[0]!r} is supported, got {short_repr(value)}")
    last_n = options.get(REPEAT_LAST_N)
    if last_n is not None and not _equals(last_n, -1) and _has_penalty(options):
        raise field_error(
            option_path(REPEAT_LAST_N),
            f"only -1 is supported: penalties apply to the whole text, got {short_repr(last_n)}",
        )


def _has_penalty(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None and not _equals(options[name], none) for name, none in _PENALTIES.items())


def _is_default(name: str, value: Any) -> bool:
    """Returns whether the option's value has the same effect as leaving the option out: no output limit, or a random
    seed."""
    if name == "num_predict":
        return any(_equals(value, one) for one in _NO_LIMIT)
    return name == "seed" and _equals(value, _RANDOM_SEED)


def _equals(value: Any, expected: Any) -> bool:
    # `False == 0`, so booleans are compared with booleans only.
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)

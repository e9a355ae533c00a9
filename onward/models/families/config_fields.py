"""Reads a checkpoint's `config.json` field by field, and remembers what was read.

A field that no family's function has read is an error that names it, unless it is known to have no effect: a field that
the decoder does not compute must never be ignored. `null`, `false` and empty values count as absent.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from onward.errors import StartupError

T = TypeVar("T", int, float)
Choice = TypeVar("Choice")

_MAX_NUMBER = 1e30
"""Upper bound of numbers; it fits into a float32."""

_HARMLESS = re.compile(
    r"""
    _.* | .*_version | .*dropout.* | .*_pdrop | initializer_.* | .*_init_.* | output_.* | .*_token_id | .*_token_ids
    | summary_.* | unsloth_.* | .*js_config | id2label | label2id | num_labels | problem_type | return_.*
    | architectures | model_type | torch_dtype | dtype | use_cache | cache_implementation | auto_map | name_or_path
    | task_specific_params | tokenizer_class | pretraining_tp | is_llama_config | is_decoder | gradient_checkpointing
    | embedding_size | n_ctx | chunk_size_feed_forward | eos_token | bos_token | max_length | tf_legacy_loss
    | use_bfloat16 | pruned_heads | finetuning_task | prefix | transformers_weights | upcast_.*
    """,
    re.VERBOSE,
)
"""Fields about training, generation defaults, other tools and how a file was written; none changes what a decoder
computes."""


class ConfigFields:
    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        self._raw, self._path = raw, path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def get(self, key: str) -> Any:
        self._read.add(key)
        return self._raw.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer above zero."""
        return self._positive(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number above zero."""
        return self._positive(key, float, default)

    def count(self, key: str, default: int) -> int:
        """Returns an integer, which may be zero."""
        return 0 if self.get(key) == 0 and not isinstance(self.get(key), bool) else self.integer(key, default)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Returns None if the config has `null`, and the default if it lacks the field."""
        if key in self._raw and self.get(key) is None:
            return None
        return default if key not in self._raw and default is None else self.integer(key, default)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        if key in self._raw and self.get(key) is None:
            return None
        return default if key not in self._raw and default is None else self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value)
        return value

    def choice(self, key: str, choices: Mapping[str, Choice], default: str) -> Choice:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise unsupported(f"{self._path}{key} {str(value)[:80]!r}")
        return choices[value]

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.get(key)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(_is_number(item) and 0 < item < _MAX_NUMBER for item in value):
            raise StartupError(f"the model's config is wrong: `{self._path}{key}` must be {count} positive numbers")
        return tuple(float(item) for item in value)

    def strings(self, key: str) -> list[str] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise StartupError(f"the model's config is wrong: `{self._path}{key}` must be a list of strings")
        return value

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "ConfigFields":
        """Returns a section, which is empty if the config has none. `defaults` stand for fields that it lacks. The
        caller must refuse the fields of the section that it does not read."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise StartupError(f"the model's config is wrong: `{self._path}{key}` must be an object")
        return ConfigFields(dict(defaults or {}) | value, f"{self._path}{key}.")

    def refuse(self, *keys: str) -> None:
        """Raises if one of these fields is set."""
        for key in keys:
            if value := self.get(key):
                raise unsupported(f"{self._path}{key} ({str(value)[:80]})")

    def ignore(self, *keys: str) -> None:
        """Marks fields as read that are read elsewhere, or have no effect in this family."""
        self._read.update(keys)

    def refuse_unread(self, architecture: str) -> None:
        for key, value in self._raw.items():
            says_nothing = value is None or value is False or value == [] or value == {}
            if key not in self._read and not says_nothing and not _HARMLESS.fullmatch(key):
                raise StartupError(
                    f"the model's config has `{self._path}{key}` ({str(value)[:80]}), which is not known for the "
                    f"architecture {architecture!r}; it cannot be served without knowing what it changes"
                )

    def wrong(self, key: str, value: Any) -> StartupError:
        return StartupError(f"the model's config is wrong: `{self._path}{key}` is {repr(value)[:80]}")

    def _positive(self, key: str, kind: type[T], default: T | None) -> T:
        value: Any = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise StartupError(f"the model's config lacks `{self._path}{key}`")
        limit = 1 << 31 if kind is int else _MAX_NUMBER
        if not _is_number(value) or not 0 < value < limit or (kind is int and int(value) != value):
            raise self.wrong(key, value)
        return kind(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def unsupported(feature: str) -> StartupError:
    return StartupError(f"the model needs a feature that is not supported: {feature}")

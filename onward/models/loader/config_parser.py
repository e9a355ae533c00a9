"""Turns the config of a checkpoint (Hugging Face's `config.json`, or GGUF metadata) into a `ModelConfig`.

Only configs that the decoder computes are accepted: an unknown field that could change the result is an error that
names the field, and is never ignored. Families define what their `config.json` means (`models.families`). Files are
opened elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import StartupError
from onward.models.families.registry import parse_hf
from onward.models.loader.gguf_config import parse_gguf
from onward.models.rope_scaling import rope_factors
from onward.proto.model import Experts, ModelConfig

_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 30,
}
"""Far above every existing model, and low enough that a number in a config cannot use up all memory or time."""
_MAX_EXPERTS = 1 << 17
"""Bound for the experts of all layers together, because each has tensors of its own."""
_MAX_TOP_K = 64
"""Bound for the experts of a token."""


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    try:
        return _with_checked_rope(_checked(parse_hf(raw)))
    except ArithmeticError as fault:
        raise _no_number(fault) from None


def _no_number(fault: ArithmeticError) -> StartupError:
    return StartupError(f"the model's config is wrong: its rope or scales give no number ({fault})")


def _with_checked_rope(config: ModelConfig) -> ModelConfig:
    """Returns the config. Raises an `ArithmeticError` if the factors of its rope are not numbers, such as for a theta of
    one with yarn."""
    dim, length = config.rotated_dim, config.max_position_embeddings
    rope_factors(config.rope_scaling, config.rope_theta, dim, length)
    if config.local_rope_theta is not None:
        rope_factors(config.local_rope_scaling, config.local_rope_theta, dim, length)
    return config


def from_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] | None = None,
) -> ModelConfig:
    """Returns the config of a GGUF file. `shapes` are those of the file's tensors, which alone show some facts (tied
    embeddings, biases). `rope_freqs` is the content of the tensor of that name, GGUF's form of Llama-3 rope scaling."""
    try:
        return _with_checked_rope(_checked(parse_gguf(fields, shapes, rope_freqs)))
    except ArithmeticError as fault:
        raise _no_number(fault) from None


def _checked(config: ModelConfig) -> ModelConfig:
    for field, limit in _LIMITS.items():
        _check_limit(field, getattr(config, field), limit)
    if config.num_heads % config.num_kv_heads:
        raise StartupError(
            f"the model's config is wrong: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
        )
    try:
        msgspec.convert(msgspec.to_builtins(config), ModelConfig)
    except msgspec.ValidationError as fault:
        raise StartupError(f"the model's config is wrong: {fault}") from None
    if (experts := config.experts) is not None:
        if not 0 < experts.top_k <= min(experts.num_experts, _MAX_TOP_K):
            raise StartupError(
                f"the model's config is wrong: num_experts_per_tok is {experts.top_k}, not a number from 1 to "
                f"{min(experts.num_experts, _MAX_TOP_K)}"
            )
        _check_groups(experts)
        _check_limit("num_experts", experts.num_experts, _MAX_EXPERTS // config.num_layers)
        for size in (experts.intermediate_size, experts.shared_intermediate_size or 1):
            _check_limit("moe_intermediate_size", size, _LIMITS["intermediate_size"])
    if config.head_dim % 2:
        raise StartupError(f"the model's config is wrong: head_dim {config.head_dim} is odd")
    return config


def _check_groups(experts: Experts) -> None:
    """Raises unless the groups of experts are of equal size and have as many experts as a token gets."""
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    if groups > 1 and (experts.num_experts % groups or size < 2):
        raise StartupError(
            f"the model's config is wrong: {experts.num_experts} experts are not {groups} groups (n_group) of two or more"
        )
    if not 0 < experts.top_groups <= groups or experts.top_groups * size < experts.top_k:
        raise StartupError(
            f"the model's config is wrong: {experts.top_groups} of {groups} groups (topk_group, n_group) have no "
            f"{experts.top_k} experts"
        )


def _check_limit(field: str, value: int, limit: int) -> None:
    if not 0 < value <= limit:
        raise StartupError(f"the model's config is wrong: {field} is {value}, not a number from 1 to {limit}")

"""Turns the config of a checkpoint (Hugging Face's `config.json`, or GGUF metadata) into a `ModelConfig`.

Only what the decoder computes is accepted: a field that would change the result and is not known is an error that names
it, never ignored. Families say what their `config.json` means (`models.families`); files are opened elsewhere.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import StartupError
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.families.registry import parse_hf
from onward.models.loader import gguf_rope
from onward.models.rope_scaling import rope_factors
from onward.proto.model import ModelConfig

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
"""Far above any model there is, and low enough that a number in a config cannot ask for all memory or all time."""
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    try:
        config = _checked(parse_hf(raw))
        _check_rope(config)
    except ArithmeticError as fault:
        raise StartupError(f"the model's config is wrong: its rope or scales give no number ({fault})") from None
    return config


def _check_rope(config: ModelConfig) -> None:
    """Raises an `ArithmeticError` where the factors are no numbers, such as for a theta of one with yarn."""
    dim, length = config.rotated_dim, config.max_position_embeddings
    rope_factors(config.rope_scaling, config.rope_theta, dim, length)
    if config.local_rope_theta is not None:
        rope_factors(config.local_rope_scaling, config.local_rope_theta, dim, length)


def from_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] | None = None,
) -> ModelConfig:
    """`shapes` are those of the file's tensors: some facts (tied embeddings, biases) are said only there. `rope_freqs`
    is the content of the tensor of that name, GGUF's form of Llama-3 rope scaling."""
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _GGUF_ARCHITECTURES:
        raise StartupError(
            f"the GGUF's architecture is not supported: {str(architecture)[:80]!r}; "
            f"supported are {', '.join(_GGUF_ARCHITECTURES)}"
        )
    architecture_fields = {
        key.removeprefix(architecture + "."): value
        for key, value in fields.items()
        if key.startswith(architecture + ".")
    }
    values = ConfigFields(architecture_fields)
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden // heads)
    _refuse_unsupported_gguf(architecture_fields, shapes, head_dim)
    theta = _shortest_float(values.number("rope.freq_base", 10000.0))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=heads,
        num_kv_heads=values.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=values.integer("context_length"),
        rms_norm_eps=_shortest_float(values.number("attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=gguf_rope.fit_rope_scaling(rope_freqs, theta, head_dim) if rope_freqs else None,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=architecture == "qwen3",
    )
    return _checked(config)


def _refuse_unsupported_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], head_dim: int) -> None:
    if "token_embd.weight" not in shapes:
        raise StartupError("the GGUF has no tensor token_embd.weight")
    if fields.get("expert_count"):
        raise unsupported("mixture of experts (expert_count)")
    if fields.get("attention.sliding_window"):
        raise unsupported("sliding window attention (attention.sliding_window)")
    if (kind := fields.get("rope.scaling.type", "none")) != "none":
        raise unsupported(f"rope scaling type {kind!r}")
    if (rotary := fields.get("rope.dimension_count", head_dim)) != head_dim:
        raise unsupported(f"rope over {rotary} of {head_dim} dimensions (rope.dimension_count)")
    if (value_dim := fields.get("attention.value_length", head_dim)) != head_dim:
        raise unsupported(f"values of another size than keys (attention.value_length {value_dim})")


def _checked(config: ModelConfig) -> ModelConfig:
    for field, limit in _LIMITS.items():
        if not 0 < (value := getattr(config, field)) <= limit:
            raise StartupError(f"the model's config is wrong: {field} is {value}, not a number from 1 to {limit}")
    if config.num_heads % config.num_kv_heads:
        raise StartupError(
            f"the model's config is wrong: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
        )
    try:
        msgspec.convert(msgspec.to_builtins(config), ModelConfig)
    except msgspec.ValidationError as fault:
        raise StartupError(f"the model's config is wrong: {fault}") from None
    if config.head_dim % 2:
        raise StartupError(f"the model's config is wrong: head_dim {config.head_dim} is odd")
    return config


def _shortest_float(value: float) -> float:
    """GGUF stores float32: 1e-5 comes back as 9.999999747e-06. The shortest decimal of the same float32 is meant."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value

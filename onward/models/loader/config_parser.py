"""Turns the config of a checkpoint (Hugging Face's `config.json`, or GGUF metadata) into a `ModelConfig`.

Only what the decoder computes is accepted: a feature that would change the result and is not there (sliding windows,
other rope types, experts, …) is an error that names it, never ignored. Files are opened elsewhere.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from onward.errors import StartupError
from onward.models import rope_scaling
from onward.proto.model import ModelConfig, RopeScaling

T = TypeVar("T", int, float)

_MAX_NUMBER = 1e30
"""Still a float32."""

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
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
_DEFAULT_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    architecture = _hf_architecture(raw)
    _refuse_unsupported_hf(raw, architecture)
    hidden, heads = _positive(raw, "hidden_size", int), _positive(raw, "num_attention_heads", int)
    head_dim = _positive(raw, "head_dim", int, 128 if architecture == "qwen3" else hidden // heads)
    theta, scaling = _hf_rope(raw)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", int),
        num_layers=_positive(raw, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_position_embeddings=_positive(raw, "max_position_embeddings", int, _DEFAULT_POSITIONS[architecture]),
        rms_norm_eps=_positive(raw, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    return _checked(config)


def _hf_architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise StartupError("config.json: `architectures` must be a list")
    for name in filter(lambda name: isinstance(name, str), names):
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    given = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    raise StartupError(
        f"the model's architecture is not supported: {given[:200]}; supported are {', '.join(HF_ARCHITECTURES)}"
    )


def _refuse_unsupported_hf(raw: Mapping[str, Any], architecture: str) -> None:
    if raw.get("quantization_config"):
        method = _section(raw, "quantization_config").get("quant_method", "unknown")
        raise _unsupported(f"quantization_config (method {method})")
    if architecture != "qwen2" and raw.get("attention_bias"):
        raise _unsupported("attention_bias (a bias on o_proj)")
    if raw.get("mlp_bias"):
        raise _unsupported("mlp_bias")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise _unsupported(f"hidden_act {act!r}")
    if _uses_sliding_window(raw):
        raise _unsupported("sliding window attention (use_sliding_window)")


def _uses_sliding_window(raw: Mapping[str, Any]) -> bool:
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise StartupError("the model's config is wrong: `layer_types` must be a list")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return False
    return _number(raw, "max_window_layers") < _number(raw, "num_hidden_layers")


def _hf_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` before it."""
    rope = _section(raw, "rope_parameters") or _section(raw, "rope_scaling")
    theta = _positive(rope if "rope_theta" in rope else raw, "rope_theta", float, 10000.0)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _unsupported(f"partial_rotary_factor {partial}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _unsupported(f"rope type {kind!r}")
    scaling = RopeScaling(
        factor=_positive(rope, "factor", float),
        low_freq_factor=_positive(rope, "low_freq_factor", float),
        high_freq_factor=_positive(rope, "high_freq_factor", float),
        original_max_position_embeddings=_positive(rope, "original_max_position_embeddings", int),
    )
    if scaling.low_freq_factor == scaling.high_freq_factor:
        raise StartupError("the model's config is wrong: `low_freq_factor` and `high_freq_factor` are the same")
    return theta, scaling


def _section(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise StartupError(f"the model's config is wrong: `{key}` must be an object")
    return value


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StartupError(f"the model's config is wrong: `{key}` is {str(value)[:80]}")
    return value


def from_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] | None = None,
) -> ModelConfig:
    """`shapes` are those of the file's tensors: some facts (tied embeddings, biases) are said only there. `rope_freqs`
    is the content of the tensor of that name, GGUF's form of Llama-3 rope scaling."""
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in HF_ARCHITECTURES.values():
        raise StartupError(
            f"the GGUF's architecture is not supported: {str(architecture)[:80]!r}; "
            f"supported are {', '.join(HF_ARCHITECTURES.values())}"
        )
    architecture_fields = {
        key.removeprefix(architecture + "."): value
        for key, value in fields.items()
        if key.startswith(architecture + ".")
    }
    hidden, heads = (
        _positive(architecture_fields, "embedding_length", int),
        _positive(architecture_fields, "attention.head_count", int),
    )
    head_dim = _positive(architecture_fields, "attention.key_length", int, hidden // heads)
    _refuse_unsupported_gguf(architecture_fields, shapes, head_dim)
    theta = _shortest_float(_positive(architecture_fields, "rope.freq_base", float, 10000.0))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=_positive(architecture_fields, "feed_forward_length", int),
        num_layers=_positive(architecture_fields, "block_count", int),
        num_heads=heads,
        num_kv_heads=_positive(architecture_fields, "attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position_embeddings=_positive(architecture_fields, "context_length", int),
        rms_norm_eps=_shortest_float(_positive(architecture_fields, "attention.layer_norm_rms_epsilon", float)),
        rope_theta=theta,
        rope_scaling=rope_scaling.fit_rope_scaling(rope_freqs, theta, head_dim) if rope_freqs else None,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=architecture == "qwen3",
    )
    return _checked(config)


def _refuse_unsupported_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], head_dim: int) -> None:
    if "token_embd.weight" not in shapes:
        raise StartupError("the GGUF has no tensor token_embd.weight")
    if fields.get("expert_count"):
        raise _unsupported("mixture of experts (expert_count)")
    if fields.get("attention.sliding_window"):
        raise _unsupported("sliding window attention (attention.sliding_window)")
    if (kind := fields.get("rope.scaling.type", "none")) != "none":
        raise _unsupported(f"rope scaling type {kind!r}")
    if (rotary := fields.get("rope.dimension_count", head_dim)) != head_dim:
        raise _unsupported(f"rope over {rotary} of {head_dim} dimensions (rope.dimension_count)")
    if (value_dim := fields.get("attention.value_length", head_dim)) != head_dim:
        raise _unsupported(f"values of another size than keys (attention.value_length {value_dim})")


def _checked(config: ModelConfig) -> ModelConfig:
    for field, limit in _LIMITS.items():
        if not 0 < (value := getattr(config, field)) <= limit:
            raise StartupError(f"the model's config is wrong: {field} is {value}, not a number from 1 to {limit}")
    if config.num_heads % config.num_kv_heads:
        raise StartupError(
            f"the model's config is wrong: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise StartupError(f"the model's config is wrong: head_dim {config.head_dim} is odd")
    return config


def _positive(raw: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    value: Any = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"the model's config lacks `{key}`")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    limit = 1 << 31 if kind is int else _MAX_NUMBER
    if not is_number or not 0 < value < limit or (kind is int and int(value) != value):
        raise StartupError(f"the model's config is wrong: `{key}` is {repr(value)[:80]}")
    return kind(value)


def _shortest_float(value: float) -> float:
    """GGUF stores float32: 1e-5 comes back as 9.999999747e-06. The shortest decimal of the same float32 is meant."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _unsupported(feature: str) -> StartupError:
    return StartupError(f"the model needs a feature that is not supported: {feature}")

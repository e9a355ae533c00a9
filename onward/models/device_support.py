"""Which fields of `ModelConfig` each device implements. A model that needs another one is refused by the field's name.

A field counts as needed if its value is not the default. So every device refuses a new field of `ModelConfig` until it
is listed here, and no model is computed without a field that it needs.
"""

from onward.errors import StartupError
from onward.proto.model import ModelConfig

_EVERYWHERE = frozenset({"rope_scaling", "tie_word_embeddings", "qkv_bias", "qk_norm"})

_ALL = _EVERYWHERE | {
    "qk_norm_is_whole", "o_bias", "mlp_bias", "norm", "norm_bias", "norm_weight_offset", "pre_norm", "post_norm",
    "parallel_block", "activation", "gated_mlp", "query_scale", "rotary_dim", "local_rope_theta", "local_rope_scaling",
    "layers", "attention_softcap", "attention_sinks", "learned_positions", "embedding_multiplier",
    "residual_multiplier", "logits_multiplier", "logit_softcap", "unpadded_head_dim", "experts", "clamped_swiglu",
}  # fmt: skip
_PLAIN_ONLY = frozenset({"experts", "clamped_swiglu"})
"""Implemented with plain operations only. They wait for the host in the middle of a step, which a CUDA graph cannot
do."""

IMPLEMENTED: dict[str, frozenset[str]] = {
    "cpu int8": _ALL,
    "cpu float": _ALL,
    "torch": _ALL,
    "cuda": _ALL - _PLAIN_ONLY,
    "eagle": _EVERYWHERE,
}
"""The implemented fields by kind of device. `torch` is the CUDA worker with plain operations, which tests run on the
host. `eagle` stands for draft layers between a served model's embedding and head."""

_HEAD_UNITS = {"cpu int8": 32, "cpu float": 16, "eagle": 16}
"""The kernels' vectors have 16 lanes, and int8 groups 32 values. CUDA checks its sizes itself."""


def device_kind(device: str, quantization: str) -> str:
    if device == "cuda":
        return "cuda"
    return "cpu int8" if quantization == "int8" else "cpu float"


def check_supported(config: ModelConfig, kind: str) -> None:
    """Raises unless a device of this kind computes the model exactly as its config says."""
    for field in needed_fields(config):
        if field not in IMPLEMENTED[kind]:
            value = str(getattr(config, field))[:80]
            raise StartupError(f"the model's {field} ({value}) is not supported on {kind}")
    if config.parallel_block and config.post_norm:
        raise StartupError("the model's parallel_block together with post_norm is not supported")
    if config.experts is not None and (config.parallel_block or not config.gated_mlp):
        raise StartupError("the model's experts together with parallel_block or without gated_mlp are not supported")
    _check_router(config)
    if kind not in ("cuda", "torch"):
        _check_sizes(config, kind)


def _check_router(config: ModelConfig) -> None:
    experts = config.experts
    if experts is not None and experts.scores == "softmax" and (experts.selection_bias or experts.num_groups > 1):
        raise StartupError(
            "the model's experts with a selection_bias or num_groups, without sigmoid scores, are not supported"
        )


def head_unit(quantization: str) -> int:
    """Returns the number of which the CPU kernels need head sizes to be multiples; `models.head_padding` pads heads to
    it."""
    return _HEAD_UNITS[device_kind("cpu", quantization)]


def is_plain(config: ModelConfig) -> bool:
    """Returns whether the kernels for plain Llamas compute the model. Those of the CPU are compiled without all other
    features."""
    return _EVERYWHERE.issuperset(needed_fields(config))


def needed_fields(config: ModelConfig) -> list[str]:
    """Returns the fields whose value differs from their default."""
    fields, defaults = config.__struct_fields__, config.__struct_defaults__
    optional = zip(fields[len(fields) - len(defaults) :], defaults, strict=True)
    return [field for field, default in optional if getattr(config, field) != default]


def _check_sizes(config: ModelConfig, kind: str) -> None:
    """Raises for sizes that the CPU kernels cannot handle. Heads of any size are padded (`models.head_padding`), except
    those of draft layers."""
    if kind == "eagle":
        names = ("head_dim",)
    else:
        names = ("hidden_size", "intermediate_size") if kind == "cpu int8" else ()
    sizes = {name: getattr(config, name) for name in names}
    if config.experts is not None and kind == "cpu int8":
        sizes["experts.intermediate_size"] = config.experts.intermediate_size
        sizes["experts.shared_intermediate_size"] = config.experts.shared_intermediate_size or 0
    for name, size in sizes.items():
        if size % _HEAD_UNITS[kind]:
            raise StartupError(f"the model's {name} is {size}; on CPU it must be a multiple of {_HEAD_UNITS[kind]}")
    if config.num_heads % config.num_kv_heads:
        raise StartupError(f"the model's {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")

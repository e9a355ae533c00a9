"""Which fields of `ModelConfig` each device implements. A model that needs another one is refused by the field's name.

A field counts as needed where its value is not the default. So a field that is new to `ModelConfig` is refused by every
device until its name stands here, and nothing is ever computed without it.
"""

from onward.errors import StartupError
from onward.proto.model import ModelConfig

_EVERYWHERE = frozenset({"rope_scaling", "tie_word_embeddings", "qkv_bias", "qk_norm"})

_ALL = _EVERYWHERE | {
    "qk_norm_is_whole", "o_bias", "mlp_bias", "norm", "norm_bias", "norm_weight_offset", "pre_norm", "post_norm",
    "parallel_block", "activation", "gated_mlp", "query_scale", "rotary_dim", "local_rope_theta", "local_rope_scaling",
    "layers", "attention_softcap", "attention_sinks", "learned_positions", "embedding_multiplier",
    "residual_multiplier", "logits_multiplier", "logit_softcap", "unpadded_head_dim",
}  # fmt: skip

IMPLEMENTED: dict[str, frozenset[str]] = {
    "cpu int8": _ALL,
    "cpu float": _ALL,
    "cuda": _ALL,
    "eagle": _EVERYWHERE,
}
"""By the kind of device. `eagle` stands for draft layers between a served model's embedding and head."""

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
    if kind != "cuda":
        _check_sizes(config, kind)


def head_unit(quantization: str) -> int:
    """Of what the CPU's kernels need heads to be a multiple; `models.head_padding` makes them so."""
    return _HEAD_UNITS[device_kind("cpu", quantization)]


def is_plain(config: ModelConfig) -> bool:
    """Whether the kernels for plain Llamas compute the model; those of the CPU are compiled without everything else."""
    return _EVERYWHERE.issuperset(needed_fields(config))


def needed_fields(config: ModelConfig) -> list[str]:
    """The fields with a default whose value is another one."""
    fields, defaults = config.__struct_fields__, config.__struct_defaults__
    optional = zip(fields[len(fields) - len(defaults) :], defaults, strict=True)
    return [field for field, default in optional if getattr(config, field) != default]


def _check_sizes(config: ModelConfig, kind: str) -> None:
    """Heads of any size are padded (`models.head_padding`), but for draft layers."""
    if kind == "eagle":
        names = ("head_dim",)
    else:
        names = ("hidden_size", "intermediate_size") if kind == "cpu int8" else ()
    for name in names:
        if (size := getattr(config, name)) % _HEAD_UNITS[kind]:
            raise StartupError(f"the model's {name} is {size}; on CPU it must be a multiple of {_HEAD_UNITS[kind]}")
    if config.num_heads % config.num_kv_heads:
        raise StartupError(f"the model's {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")

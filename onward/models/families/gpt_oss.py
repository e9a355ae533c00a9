"""gpt-oss: attention sinks, alternating windows, biases everywhere, and experts with a clamped SwiGLU, stored in MXFP4 or
in floats with their inputs first."""

from typing import Any

from onward.errors import StartupError
from onward.models.families.common_fields import layer_kinds, rope, sizes
from onward.models.families.config_fields import ConfigFields
from onward.models.families.expert_tensors import experts_of, parse_expert_name
from onward.models.families.family import Family, TensorSource
from onward.models.families.mxfp4 import GROUP, dequantize, kernel_blocks
from onward.models.tensor_names import Shape
from onward.proto.model import ClampedSwiglu, Experts, ModelConfig


def _parse(fields: ConfigFields) -> dict[str, Any]:
    found = sizes(fields, positions=131_072, eps=1e-5, head_dim=64)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise StartupError("the model's config lacks `rope_scaling`")
    found |= rope(fields, found, theta=150_000.0)
    num_layers, window = found["num_layers"], fields.optional_integer("sliding_window", 128)
    fields.choice("hidden_act", {"silu": "silu"}, "silu")
    has_bias, top_k = fields.flag("attention_bias", True), fields.integer("num_experts_per_tok", 4)
    _check_repeated(fields, "experts_per_token", top_k)
    _check_repeated(fields, "initial_context_length", _original_context(found))
    fields.ignore("router_aux_loss_coef")  # used in training only
    return found | {
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": True,
        "attention_sinks": True,
        "clamped_swiglu": ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        "layers": layer_kinds(fields, num_layers, window, default=[layer % 2 == 0 for layer in range(num_layers)]),
        "experts": Experts(
            num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
            top_k=top_k,
            intermediate_size=found["intermediate_size"],
            renormalize=True,
            router_bias=True,
        ),
    }


def _original_context(found: dict[str, Any]) -> int:
    return getattr(found["rope_scaling"], "original_max_position_embeddings", found["max_position_embeddings"])


def _check_repeated(fields: ConfigFields, key: str, value: int) -> None:
    """Raises if a field that repeats another one has a different value. Published configs have some values twice."""
    if (repeated := fields.get(key)) is not None and repeated != value:
        raise fields.wrong(key, repeated)


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    """Locates tensors of float checkpoints. Each layer stores `gate_up_proj` and `down_proj` of all its experts as
    [experts, inputs, outputs], and their biases. The outputs of gates and ups alternate."""
    if (found := parse_expert_name(name)) is None:
        return TensorSource(name, shape)
    index, part, kind = found
    count = experts_of(config).num_experts
    stored = "mlp.experts.down_proj" if part == "down" else "mlp.experts.gate_up_proj"
    rows = slice(None) if part == "down" else slice(part == "up", None, 2)
    num_rows = shape[0] if part == "down" else 2 * shape[0]
    if kind == "bias":
        return TensorSource(f"{stored}_bias", (count, num_rows), lambda array: array[index, rows])
    return TensorSource(stored, (count, shape[1], num_rows), lambda array: array[index, :, rows].T)


def _locate_mxfp4(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    """Locates tensors of MXFP4 checkpoints. Outputs come before inputs, and each output is stored in groups."""
    found = parse_expert_name(name)
    if found is None or found[2] == "bias":
        return _locate(name, shape, config)
    index, part, _ = found
    stored = "mlp.experts.down_proj" if part == "down" else "mlp.experts.gate_up_proj"
    rows = slice(None) if part == "down" else slice(part == "up", None, 2)
    num_rows, num_groups = shape[0] if part == "down" else 2 * shape[0], -(-shape[1] // GROUP)
    scales = (experts_of(config).num_experts, num_rows, num_groups)
    return TensorSource(
        f"{stored}_blocks",
        (*scales, GROUP // 2),
        lambda blocks, scales: dequantize(blocks[index, rows], scales[index, rows]),
        ((f"{stored}_scales", scales),),
        lambda blocks, scales: kernel_blocks(blocks[index, rows], scales[index, rows]),
    )


FAMILIES = [
    Family(
        "gptoss", "GptOssForCausalLM", _parse, _locate, other_layouts=(_locate_mxfp4,), quantization_methods=("mxfp4",)
    )
]

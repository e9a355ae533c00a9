"""Checks the arrays of a converted int8 model against its config, from the headers of its files.

The kernels compute addresses from the config alone, so an array of another size would make them read beyond its end.
The names are those that `kernels.quantize` writes.
"""

from collections.abc import Iterator, Mapping

from onward.errors import StartupError
from onward.kernels.weight_formats import FORMATS, GROUP, OUTPUT_UNIT, TILE
from onward.models.loader.safetensors_header import TensorLocation
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig

_MAX_QKV_SEGMENTS = 3
"""q, k and v. All other matrices are one array each."""
_BY_RECORD = {kind.record_bytes: kind for kind in FORMATS.values()}
Expected = Iterator[tuple[str, Shape, bool]]
"""Name, shape, and whether the array is a packed matrix of [outputs, inputs]; other arrays are float32."""


def check_int8_arrays(found: Mapping[str, TensorLocation], config: ModelConfig, source: str) -> None:
    """Raises `StartupError`, which names the file and the array, unless all arrays have the sizes of the config, whose
    heads are padded."""
    for name, shape, is_matrix in _expected_arrays(config):
        if name not in found:
            raise StartupError(
                f"{source} lacks the array {name}; remove the folder, so that the model is converted again"
            )
        if is_matrix:
            _check_matrix(name, shape, found)
        elif found[name].dtype != "F32" or found[name].shape != shape:
            raise _unusable(name, found[name], f"expected F32 {list(shape)}")


def _check_matrix(name: str, shape: Shape, found: Mapping[str, TensorLocation]) -> None:
    outputs, inputs = shape
    max_segments = _MAX_QKV_SEGMENTS if name.endswith(".qkv") else 1
    names = [name, *(f"{name}.{index}" for index in range(1, max_segments))]
    num_outputs = 0
    for segment in (one for one in names if one in found):
        location = found[segment]
        kind = _BY_RECORD.get(location.shape[-1]) if location.dtype == "U8" and len(location.shape) == 3 else None
        if kind is None or location.shape[1] * kind.groups * GROUP != inputs or location.shape[0] * TILE % OUTPUT_UNIT:
            raise _unusable(segment, location, f"expected the packed weights of {inputs} inputs")
        num_outputs += location.shape[0] * TILE
    if num_outputs != -(-outputs // OUTPUT_UNIT) * OUTPUT_UNIT:
        raise _unusable(name, found[name], f"expected the packed weights of {outputs} outputs")


def _unusable(name: str, location: TensorLocation, expected: str) -> StartupError:
    return StartupError(
        f"{location.path}: {name} is {location.dtype} {list(location.shape)}, {expected}; remove the folder, so that the "
        "model is converted again"
    )


def _expected_arrays(config: ModelConfig) -> Expected:
    hidden = config.hidden_size
    yield "embed", (config.vocab_size, hidden), True
    if config.learned_positions:
        yield "positions", (config.max_position_embeddings, hidden), False
    for layer in range(config.num_layers):
        for name, shape, is_matrix in _expected_layer(config, layer):
            yield f"layers.{layer}.{name}", shape, is_matrix
    yield from _norm("norm", config)
    if not config.tie_word_embeddings:
        yield "head", (config.vocab_size, hidden), True


def _expected_layer(config: ModelConfig, layer: int) -> Expected:
    hidden, experts = config.hidden_size, config.layer_experts(layer)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.pre_norm:
        yield from _norm("input_norm", config)
        yield from _norm("post_norm", config)
    if config.post_norm:
        yield from _norm("out_norm", config)
        yield from _norm("mlp_norm", config)
    yield from _linear("qkv", q_size + 2 * kv_size, hidden, config.qkv_bias)
    yield from _linear("o", hidden, q_size, config.o_bias)
    if config.qk_norm:
        yield "q_norm", (q_size if config.qk_norm_is_whole else config.head_dim,), False
        yield "k_norm", (kv_size if config.qk_norm_is_whole else config.head_dim,), False
    if config.attention_sinks:
        yield "sinks", (config.num_heads,), False
    if experts is None:
        yield from _mlp("", config.intermediate_size, config)
        return
    yield "router", (experts.num_experts, hidden), False
    if experts.router_bias:
        yield "router_bias", (experts.num_experts,), False
    if experts.selection_bias:
        yield "selection_bias", (experts.num_experts,), False
    for expert in range(experts.num_experts):
        yield from _mlp(f"experts.{expert}.", experts.intermediate_size, config)
    if experts.shared_intermediate_size is not None:
        yield from _mlp("", experts.shared_intermediate_size, config)
        if experts.shared_is_gated:
            yield "shared_gate", (hidden,), False


def _mlp(prefix: str, inner: int, config: ModelConfig) -> Expected:
    yield from _linear(f"{prefix}gate_up", (1 + config.gated_mlp) * inner, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{prefix}down", config.hidden_size, inner, config.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Expected:
    yield name, (outputs, inputs), True
    if has_bias:
        yield f"{name}_bias", (outputs,), False


def _norm(name: str, config: ModelConfig) -> Expected:
    yield name, (config.hidden_size,), False
    if config.norm_bias:
        yield f"{name}_bias", (config.hidden_size,), False

"""Functions that run a model's layers over some rows.

For plain blocks, which are those of a Llama with any attention (`has_plain_blocks`). The functions differ only in their
matrix products:
`forward_library`     the matrix library's products, which it chooses for the size of the batch
`forward_invariant`   batch-invariant products; also the fastest ones for a few rows of a small model
`forward_single_row`  products for a single row, which include norms, gate and residual

For all other models:
`forward_general`     everything in `ModelConfig`, operation by operation, with library or batch-invariant products

Each function reads the rows in `buffers.residual` and calls `attend(layer, qkv, attended)` between its products. It
leaves the last norm's output in `buffers.normed`. Only `forward_single_row` leaves the residual stream, which is normed
with the head. `forward` chooses among the other three.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.kernels.ops import NormWeights, Ops
from onward.models.layers.device.expert_layers import Product, activate, compute_experts
from onward.models.layers.device.model_weights import LinearWeights, ModelWeights
from onward.proto.model import ModelConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]

_OWN_ROWS = 192
_OWN_WEIGHTS = 8_000_000


@dataclass(frozen=True, slots=True)
class ActivationBuffers:
    """Inputs and outputs of the products of a step. Allocated once for the largest step; a step uses the first rows."""

    residual: torch.Tensor
    normed: torch.Tensor
    product: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: str) -> "ActivationBuffers":
        def new(size: int) -> torch.Tensor:
            return torch.zeros((rows, size), dtype=dtype, device=device)

        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            residual=new(config.hidden_size),
            normed=new(config.hidden_size),
            product=new(config.hidden_size),
            qkv=new(q_size + 2 * kv_size),
            attended=new(q_size),
            gate_up=new((2 if config.gated_mlp else 1) * config.intermediate_size),
            act=new(config.intermediate_size),
        )

    def first(self, count: int) -> "ActivationBuffers":
        return ActivationBuffers(
            self.residual[:count], self.normed[:count], self.product[:count], self.qkv[:count], self.attended[:count],
            self.gate_up[:count], self.act[:count],
        )  # fmt: skip


def prefers_own_kernels(weights: ModelWeights, num_rows: int) -> bool:
    """Returns whether our own products are faster than the library's, as measured on an H200. A small product takes
    less time than its launch, and our kernels may begin while the kernel before them ends. With more to compute, the
    library is faster."""
    matrices = weights.layers[0].matrices
    is_half = all(matrix.weight.dtype in (torch.bfloat16, torch.float16) for matrix in matrices)
    return is_half and num_rows <= _OWN_ROWS and max(matrix.weight.numel() for matrix in matrices) <= _OWN_WEIGHTS


def has_plain_blocks(config: ModelConfig) -> bool:
    """Returns whether norms, MLP and residual stream are those of a Llama. The operations between QKV product and
    output product, and those before and after the layers, do not matter."""
    norms = (config.norm, config.norm_bias, config.pre_norm, config.post_norm, config.qk_norm_is_whole)
    mlp = (config.activation, config.gated_mlp, config.mlp_bias, config.experts, config.clamped_swiglu)
    stream = (config.o_bias, config.parallel_block, config.residual_multiplier)
    return (norms, mlp, stream) == (
        ("rms", False, True, False, False),
        ("silu", True, False, None, None),
        (False, False, 1.0),
    )


def forward(
    config: ModelConfig, weights: ModelWeights, buffers: ActivationBuffers, ops: Ops, attend: Attend, *, own: bool
) -> None:
    """Runs all layers. `own`: with our batch-invariant products; else with the library's."""
    if not has_plain_blocks(config):
        forward_general(config, weights, buffers, ops, attend, _own_product(ops) if own else _library_product(ops))
    elif own:
        forward_invariant(weights, buffers, config.rms_norm_eps, ops, attend)
    else:
        forward_library(weights, buffers, config.rms_norm_eps, ops, attend)


def _library_product(ops: Ops) -> Product:
    def product(x: torch.Tensor, matrix: LinearWeights, out: torch.Tensor) -> None:
        ops.matmul(x, matrix.weight, out, matrix.bias, matrix.scales)
        if matrix.add_up is not None:
            matrix.add_up(out)

    return product


def _own_product(ops: Ops) -> Product:
    def product(x: torch.Tensor, matrix: LinearWeights, out: torch.Tensor) -> None:
        ops.invariant_linear(x, matrix.weight, out)
        if matrix.bias is not None:
            out.add_(matrix.bias)
        if matrix.add_up is not None:
            matrix.add_up(out)

    return product


def forward_library(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    product = _library_product(ops)
    b = buffers
    ops.rms_norm(b.residual, _norm_of(weights.layers[0].input_norm), eps, b.normed)
    for index, (layer, next_norm) in enumerate(zip(weights.layers, _following_norms(weights), strict=True)):
        product(b.normed, layer.qkv, b.qkv)
        attend(index, b.qkv, b.attended)
        product(b.attended, layer.o, b.product)
        ops.add_rms_norm(b.product, b.residual, _norm_of(layer.mlp_norm), eps, b.normed)
        product(b.normed, layer.gate_up, b.gate_up)
        ops.silu_and_mul(b.gate_up, b.act)
        product(b.act, layer.down, b.product)
        ops.add_rms_norm(b.product, b.residual, next_norm, eps, b.normed)


def forward_invariant(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    product = _own_product(ops)
    b = buffers
    ops.rms_norm(b.residual, _norm_of(weights.layers[0].input_norm), eps, b.normed)
    for index, (layer, next_norm) in enumerate(zip(weights.layers, _following_norms(weights), strict=True)):
        product(b.normed, layer.qkv, b.qkv)
        attend(index, b.qkv, b.attended)
        product(b.attended, layer.o, b.product)
        ops.add_rms_norm(b.product, b.residual, _norm_of(layer.mlp_norm), eps, b.normed)
        ops.invariant_gated_linear(b.normed, layer.gate_up.weight, b.gate_up, b.act)
        product(b.act, layer.down, b.product)
        ops.add_rms_norm(b.product, b.residual, next_norm, eps, b.normed)


def forward_single_row(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    b = buffers
    for index, layer in enumerate(weights.layers):
        norm = (_norm_of(layer.input_norm), eps)
        ops.single_row_linear(b.residual, layer.qkv.weight, b.qkv, layer.qkv.scales, norm=norm)
        if layer.qkv.bias is not None:
            b.qkv.add_(layer.qkv.bias)
        attend(index, b.qkv, b.attended)
        ops.single_row_linear(b.attended, layer.o.weight, b.residual, layer.o.scales, adds=True)
        norm = (_norm_of(layer.mlp_norm), eps)
        ops.single_row_linear(b.residual, layer.gate_up.weight, b.act, layer.gate_up.scales, norm=norm, gates=True)
        ops.single_row_linear(b.act, layer.down.weight, b.residual, layer.down.scales, adds=True)


def _norm_of(norm: NormWeights | None) -> torch.Tensor:
    assert norm is not None, "plain blocks have a norm before each product of the residual stream"
    return norm.weight


def _following_norms(weights: ModelWeights) -> list[torch.Tensor]:
    """Returns the norm after each layer, which is the next layer's input norm, or the last norm."""
    return [_norm_of(layer.input_norm) for layer in weights.layers[1:]] + [weights.norm.weight]


def forward_general(
    config: ModelConfig, weights: ModelWeights, buffers: ActivationBuffers, ops: Ops, attend: Attend, product: Product
) -> None:
    """Runs the layers of any model. Each operation works row by row, with the same kernel for every number of rows. So
    with batch-invariant products, the bits of a row do not depend on the batch."""
    b, eps, q_size = buffers, config.rms_norm_eps, config.num_heads * config.head_dim
    k_end = q_size + config.num_kv_heads * config.head_dim

    def normed(norm: NormWeights | None) -> torch.Tensor:
        if norm is None:
            return b.residual
        ops.norm(b.residual, norm, eps, b.normed)
        return b.normed

    def add_product(norm: NormWeights | None) -> None:
        if norm is not None:
            ops.norm(b.product, norm, eps, b.product)
        ops.add_scaled(b.product, config.residual_multiplier, b.residual)

    def begin_mlp(norm: NormWeights | None, gate_up: LinearWeights) -> None:
        product(normed(norm), gate_up, b.gate_up)
        activate(config, ops, b.gate_up, b.act)

    for index, layer in enumerate(weights.layers):
        product(normed(layer.input_norm), layer.qkv, b.qkv)
        if layer.whole_norms is not None:
            for part, norm in zip((b.qkv[:, :q_size], b.qkv[:, q_size:k_end]), layer.whole_norms, strict=True):
                ops.norm(part, norm, eps, part)
        if config.parallel_block:  # the MLP reads the residual stream before attention adds to it
            begin_mlp(layer.mlp_norm, layer.gate_up)
        attend(index, b.qkv, b.attended)
        product(b.attended, layer.o, b.product)
        add_product(layer.attention_output_norm)
        if layer.experts is not None:
            compute_experts(config, layer, layer.experts, normed(layer.mlp_norm), b.product, ops, product)
            if layer.down.add_up is not None:  # once for all experts of a row
                layer.down.add_up(b.product)
        else:
            if not config.parallel_block:
                begin_mlp(layer.mlp_norm, layer.gate_up)
            product(b.act, layer.down, b.product)
        add_product(layer.mlp_output_norm)
    ops.norm(b.residual, weights.norm, eps, b.normed)

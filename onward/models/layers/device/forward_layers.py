"""Ways to run a model's layers over some rows, which differ in their matrix products alone.

`forward_library`     the matrix library's products, in the way that it finds fastest for a batch
`forward_invariant`   products whose bits do not depend on the batch; also the fastest for some rows of a small model
`forward_single_row`  for a single row: norms, gate and residual on the way

Each takes the rows that lie in `buffers.residual` and calls `attend(layer, qkv, attended)` between its products. The first
two leave the last norm's output in `buffers.normed`, the third the residual stream, which is normed with the head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.kernels.ops import Ops
from onward.models.layers.device.model_weights import LinearWeights, ModelWeights
from onward.proto.model import ModelConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]

_OWN_ROWS = 192
_OWN_WEIGHTS = 8_000_000


@dataclass(frozen=True, slots=True)
class ActivationBuffers:
    """What lies between the products of a step. Allocated once for the largest step; a step uses the first rows."""

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
            gate_up=new(2 * config.intermediate_size),
            act=new(config.intermediate_size),
        )

    def first(self, count: int) -> "ActivationBuffers":
        return ActivationBuffers(
            self.residual[:count], self.normed[:count], self.product[:count], self.qkv[:count], self.attended[:count],
            self.gate_up[:count], self.act[:count],
        )  # fmt: skip


def prefers_own_kernels(weights: ModelWeights, num_rows: int) -> bool:
    """Measured on an H200. A small product is over before it would have been launched, and ours may begin while the kernel
    before them ends; with more to compute the library's are better."""
    matrices = weights.layers[0].matrices
    is_half = all(matrix.weight.dtype in (torch.bfloat16, torch.float16) for matrix in matrices)
    return is_half and num_rows <= _OWN_ROWS and max(matrix.weight.numel() for matrix in matrices) <= _OWN_WEIGHTS


def forward_library(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    def product(x: torch.Tensor, matrix: LinearWeights, out: torch.Tensor) -> None:
        ops.matmul(x, matrix.weight, out, matrix.bias, matrix.scales)

    b = buffers
    ops.rms_norm(b.residual, weights.layers[0].input_norm, eps, b.normed)
    for index, (layer, next_norm) in enumerate(zip(weights.layers, weights.following_norms(), strict=True)):
        product(b.normed, layer.qkv, b.qkv)
        attend(index, b.qkv, b.attended)
        product(b.attended, layer.o, b.product)
        ops.add_rms_norm(b.product, b.residual, layer.post_norm, eps, b.normed)
        product(b.normed, layer.gate_up, b.gate_up)
        ops.silu_and_mul(b.gate_up, b.act)
        product(b.act, layer.down, b.product)
        ops.add_rms_norm(b.product, b.residual, next_norm, eps, b.normed)


def forward_invariant(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    b = buffers
    ops.rms_norm(b.residual, weights.layers[0].input_norm, eps, b.normed)
    for index, (layer, next_norm) in enumerate(zip(weights.layers, weights.following_norms(), strict=True)):
        ops.invariant_linear(b.normed, layer.qkv.weight, b.qkv)
        if layer.qkv.bias is not None:
            b.qkv.add_(layer.qkv.bias)
        attend(index, b.qkv, b.attended)
        ops.invariant_linear(b.attended, layer.o.weight, b.product)
        ops.add_rms_norm(b.product, b.residual, layer.post_norm, eps, b.normed)
        ops.invariant_gated_linear(b.normed, layer.gate_up.weight, b.gate_up, b.act)
        ops.invariant_linear(b.act, layer.down.weight, b.product)
        ops.add_rms_norm(b.product, b.residual, next_norm, eps, b.normed)


def forward_single_row(weights: ModelWeights, buffers: ActivationBuffers, eps: float, ops: Ops, attend: Attend) -> None:
    b = buffers
    for index, layer in enumerate(weights.layers):
        ops.single_row_linear(b.residual, layer.qkv.weight, b.qkv, layer.qkv.scales, norm=(layer.input_norm, eps))
        if layer.qkv.bias is not None:
            b.qkv.add_(layer.qkv.bias)
        attend(index, b.qkv, b.attended)
        ops.single_row_linear(b.attended, layer.o.weight, b.residual, layer.o.scales, adds=True)
        norm = (layer.post_norm, eps)
        ops.single_row_linear(b.residual, layer.gate_up.weight, b.act, layer.gate_up.scales, norm=norm, gates=True)
        ops.single_row_linear(b.act, layer.down.weight, b.residual, layer.down.scales, adds=True)

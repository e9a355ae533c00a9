"""Mixtures of experts on a device, with plain operations: rows are sorted by expert, and each expert that has rows
computes these. The host has to find out which experts have rows, so a step with experts cannot be captured in a CUDA
graph.

With batch-invariant products, the bits of a row do not depend on the other rows of its experts either.
"""

from collections.abc import Callable

import torch

from onward.kernels.ops import Ops
from onward.kernels.torch_reference import clamped_swiglu
from onward.models.layers.device.model_weights import ExpertWeights, LayerWeights, LinearWeights
from onward.models.layers.expert_routing import choose_experts, rows_by_expert, sum_of_experts
from onward.proto.model import ModelConfig

Product = Callable[[torch.Tensor, LinearWeights, torch.Tensor], None]
"""Called with input, matrix and output."""


def activate(config: ModelConfig, ops: Ops, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    if (clamped := config.clamped_swiglu) is None:
        ops.activate(gate_up, config.activation, out)
    else:
        gate, up = gate_up.double().chunk(2, dim=-1)
        out.copy_(clamped_swiglu(gate, up, clamped.alpha, clamped.limit))


def compute_experts(
    config: ModelConfig, layer: LayerWeights, weights: ExpertWeights, x: torch.Tensor, out: torch.Tensor, ops: Ops,
    product: Product,
) -> None:  # fmt: skip
    """Writes the weighted sum of the outputs of each row's experts to `out`."""
    assert config.experts is not None, "a layer with experts is one of a model with experts"
    count, hidden = config.experts.num_experts, x.shape[1]

    def mlp(rows: torch.Tensor, gate_up: LinearWeights, down: LinearWeights) -> torch.Tensor:
        both = rows.new_empty((len(rows), len(gate_up.weight)))
        product(rows, gate_up, both)
        inner = rows.new_empty((len(rows), len(gate_up.weight) // 2))
        activate(config, ops, both, inner)
        output = rows.new_empty((len(rows), hidden))
        product(inner, down, output)
        return output

    wide = x.float()
    scores = wide.new_empty((len(x), count))
    product(wide, weights.router, scores)
    chosen, shares = choose_experts(scores, config.experts, weights.selection_bias)
    outputs = wide.new_empty((*chosen.shape, hidden))
    for expert, rows, places in rows_by_expert(chosen):
        gate_up, down = (_part(matrix, expert, count) for matrix in (layer.gate_up, layer.down))
        outputs[rows, places] = mlp(x[rows], gate_up, down).float()
    total = sum_of_experts(outputs, shares)
    if (shared := weights.shared) is not None:
        output = mlp(x, shared.gate_up, shared.down)
        if shared.gate is not None:
            share = wide.new_empty((len(x), 1))
            product(wide, shared.gate, share)
            output = torch.sigmoid(share) * output
        total = total + output
    out.copy_(total)


def _part(matrix: LinearWeights, index: int, count: int) -> LinearWeights:
    """Returns one of `count` matrices that are stored one after the other."""
    size = len(matrix.weight) // count
    rows = slice(index * size, (index + 1) * size)
    bias, scales = (None if values is None else values[rows] for values in (matrix.bias, matrix.scales))
    return LinearWeights(matrix.weight[rows], bias, scales)

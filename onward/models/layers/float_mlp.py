"""The float family's MLPs and mixtures of experts: torch products, and an activation between them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onward.kernels.torch_reference import clamped_swiglu
from onward.models.layers.expert_routing import choose_experts, rows_by_expert, sum_of_experts
from onward.proto.model import Experts, ModelConfig


class Linear:
    """One product for several matrices that share their input."""

    def __init__(self, parts: list[Any], biases: list[Any], dtype: torch.dtype) -> None:
        self.weight = torch.cat([as_tensor(part, dtype) for part in parts])
        self.bias = torch.cat([as_tensor(bias, dtype) for bias in biases]) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


def as_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.to(dtype)
    if not array.flags.writeable:  # mapped weights; torch warns about sharing read-only memory
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip


class FloatMlp:
    """One MLP, or one expert."""

    def __init__(self, weights: Mapping[str, Any], name: str, config: ModelConfig, dtype: torch.dtype) -> None:
        def linear(*parts: str) -> Linear:
            biases = [weights[f"{name}.{part}_proj.bias"] for part in parts] if config.mlp_bias else []
            return Linear([weights[f"{name}.{part}_proj.weight"] for part in parts], biases, dtype)

        self.gate_up = linear("gate", "up") if config.gated_mlp else linear("up")
        self.down = linear("down")
        self._activate, self._is_gated = _ACTIVATIONS[config.activation], config.gated_mlp
        self._clamped_swiglu = config.clamped_swiglu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gate_up(x)
        if not self._is_gated:
            return self.down(self._activate(inner))
        gate, up = inner.chunk(2, dim=-1)
        if (clamped := self._clamped_swiglu) is not None:
            return self.down(clamped_swiglu(gate, up, clamped.alpha, clamped.limit))
        return self.down(self._activate(gate) * up)


class FloatExperts:
    """An expert router and its experts, each of which computes all its rows together. The router is always float32,
    because a rounded score can choose another expert."""

    def __init__(
        self, weights: Mapping[str, Any], name: str, config: ModelConfig, experts: Experts, dtype: torch.dtype
    ) -> None:
        self._experts = experts
        biases = [weights[f"{name}.router.bias"]] if experts.router_bias else []
        self.router = Linear([weights[f"{name}.router.weight"]], biases, torch.float32)
        self.selection_bias: torch.Tensor | None = None
        if experts.selection_bias:
            self.selection_bias = as_tensor(weights[f"{name}.router.selection_bias"], torch.float32)
        self.mlps = [FloatMlp(weights, f"{name}.experts.{i}", config, dtype) for i in range(experts.num_experts)]
        self.shared: FloatMlp | None = None
        self.shared_gate: Linear | None = None
        if experts.shared_intermediate_size is not None:
            self.shared = FloatMlp(weights, f"{name}.shared_expert", config, dtype)
        if self.shared is not None and experts.shared_is_gated:
            self.shared_gate = Linear([weights[f"{name}.shared_expert_gate.weight"]], [], torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, shares = choose_experts(self.router(x), self._experts, self.selection_bias)
        outputs = x.new_empty((*chosen.shape, x.shape[1]))
        for expert, rows, places in rows_by_expert(chosen):
            outputs[rows, places] = self.mlps[expert](x[rows])
        total = sum_of_experts(outputs, shares)
        if self.shared is None:
            return total
        output = self.shared(x)
        return total + (output if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * output)

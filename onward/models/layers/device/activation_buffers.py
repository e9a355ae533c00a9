"""What lies between the products of a step. Allocated once for the largest step; a step uses the first rows."""

from dataclasses import dataclass

import torch

from onward.proto.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ActivationBuffers:
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

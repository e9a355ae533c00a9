"""The float family: torch products and norms around our own attention. Nothing here is tuned but the attention.

The residual stream, norms, rope and KV are float32; `dtype` is the type of the weights and of what they multiply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onward.kernels.cpu.paged import paged_attention, rope_and_store
from onward.layers.paged_kv import AttentionScratch, PagedKV
from onward.layers.rotary import RotaryTable
from onward.layers.rows import Rows
from onward.proto.model import ModelConfig


class Linear:
    """One product for several matrices that share their input."""

    def __init__(self, parts: list[Any], biases: list[Any], dtype: torch.dtype) -> None:
        self.weight = torch.cat([_tensor(part, dtype) for part in parts])
        self.bias = torch.cat([_tensor(bias, dtype) for bias in biases]) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


class RMSNorm:
    def __init__(self, weight: Any, eps: float) -> None:
        self.weight, self.eps = _tensor(weight, torch.float32), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.to(dtype)
    if not array.flags.writeable:  # mapped weights; torch warns about sharing what it may not write
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(slots=True)
class Attention:
    """Rope, KV write and attention, between the two products."""

    config: ModelConfig
    rotary: RotaryTable
    scratch: AttentionScratch
    kv: PagedKV

    def __call__(
        self, qkv: torch.Tensor, rows: Rows, layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        c, kv, scratch = self.config, self.kv, self.scratch
        flat, kv_at = qkv.numpy().reshape(-1), layer * kv.layer_stride
        rope_and_store(
            flat, rows.count, rows.positions, rows.pages, kv.block_size, c.num_heads, c.num_kv_heads, c.head_dim,
            self.rotary.cos, self.rotary.sin, _address(q_norm), _address(k_norm), np.float32(c.rms_norm_eps), kv.data, kv_at,
        )  # fmt: skip
        out = np.empty((rows.count, c.num_heads * c.head_dim), np.float32)
        paged_attention(
            flat, kv.data, kv_at, rows.block_tables.reshape(-1), rows.block_tables.shape[1], kv.block_size,
            rows.tiles.reshape(-1), len(rows.tiles), c.num_heads, c.num_kv_heads, c.head_dim,
            np.float32(c.head_dim**-0.5), scratch.buffer, scratch.stride, scratch.work, scratch.num_threads,
            out.reshape(-1),
        )  # fmt: skip
        return torch.from_numpy(out)


class FloatBlock:
    """One decoder layer."""

    def __init__(
        self, index: int, weights: Mapping[str, Any], config: ModelConfig, attention: Attention, dtype: torch.dtype
    ) -> None:
        prefix, eps = f"model.layers.{index}.", config.rms_norm_eps

        def linear(*names: str, biased: bool = False) -> Linear:
            biases = [weights[f"{prefix}{name}.bias"] for name in names] if biased else []
            return Linear([weights[f"{prefix}{name}.weight"] for name in names], biases, dtype)

        def head_norm(name: str) -> torch.Tensor | None:
            return _tensor(weights[f"{prefix}self_attn.{name}.weight"], torch.float32) if config.qk_norm else None

        self.index, self.attention = index, attention
        self.input_norm = RMSNorm(weights[prefix + "input_layernorm.weight"], eps)
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", biased=config.qkv_bias)
        self.q_norm, self.k_norm = head_norm("q_norm"), head_norm("k_norm")
        self.o = linear("self_attn.o_proj")
        self.post_norm = RMSNorm(weights[prefix + "post_attention_layernorm.weight"], eps)
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")

    def __call__(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden))
        hidden = hidden + self.o(self.attention(qkv, rows, self.index, self.q_norm, self.k_norm))
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class FloatModel:
    """The layers of one model, and what comes before and after them."""

    def __init__(
        self, weights: Mapping[str, Any], config: ModelConfig, attention: Attention, dtype: torch.dtype
    ) -> None:
        self.embedding = _tensor(weights["model.embed_tokens.weight"], dtype)
        self.blocks = [FloatBlock(i, weights, config, attention, dtype) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights["model.norm.weight"], config.rms_norm_eps)
        head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.head = Linear([head], [], dtype)

    @torch.inference_mode()
    def forward(self, rows: Rows) -> np.ndarray:
        hidden = self.embedding[torch.from_numpy(rows.token_ids).long()].float()
        for block in self.blocks:
            hidden = block(hidden, rows)
        return self.head(self.norm(hidden[torch.from_numpy(rows.sampled)])).numpy()

"""The float family: torch products and norms around our own attention. Nothing here is tuned but the attention.

The residual stream, norms, rope and KV are float32; `dtype` is the type of the weights and of what they multiply.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onward.kernels.cpu.batch_attention import NUM_PHASES, rotate_and_attend
from onward.kernels.cpu.phases import WORDS_PER_PHASE
from onward.kernels.cpu.threads import ThreadPool
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.kernel_context import fill_batch_fields, fill_context, fill_model_fields, new_context
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTable
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


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Attention:
    """Rope, KV write and attention, between the two products."""

    def __init__(
        self, config: ModelConfig, rotary: RotaryTable, kv: PagedKV, scratch: AttentionScratch, threads: ThreadPool
    ) -> None:
        self._references = (rotary, kv, scratch)
        self._width, self._layer_stride = config.num_heads * config.head_dim, kv.layer_stride
        self._threads = threads
        self._work = np.zeros((NUM_PHASES, WORDS_PER_PHASE), np.int64)
        self._context = new_context(rotate_and_attend)
        fill_model_fields(self._context, config, rotary, kv, scratch, threads)
        fill_context(self._context, work=self._work)

    def __call__(
        self,
        qkv: torch.Tensor,
        rows: ForwardBatch,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        assert qkv.is_contiguous()
        out = torch.empty((rows.num_rows, self._width))
        fill_batch_fields(self._context, rows)
        fill_context(
            self._context, qkv=qkv.data_ptr(), attended=out.data_ptr(), kv_at=layer * self._layer_stride,
            q_norm=_address(q_norm), k_norm=_address(k_norm),
        )  # fmt: skip
        self._work[:] = 0
        self._threads.run(rotate_and_attend, self._context)
        return out


class FloatDecoderLayer:
    """One decoder layer."""

    def __init__(
        self,
        index: int,
        weights: Mapping[str, Any],
        config: ModelConfig,
        attention: Attention,
        dtype: torch.dtype,
        *,
        has_input_norm: bool = True,
    ) -> None:
        prefix, eps = f"model.layers.{index}.", config.rms_norm_eps

        def linear(*names: str, biased: bool = False) -> Linear:
            biases = [weights[f"{prefix}{name}.bias"] for name in names] if biased else []
            return Linear([weights[f"{prefix}{name}.weight"] for name in names], biases, dtype)

        def head_norm(name: str) -> torch.Tensor | None:
            return _tensor(weights[f"{prefix}self_attn.{name}.weight"], torch.float32) if config.qk_norm else None

        self.index, self.attention = index, attention
        self.input_norm = RMSNorm(weights[prefix + "input_layernorm.weight"], eps) if has_input_norm else _identity
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", biased=config.qkv_bias)
        self.q_norm, self.k_norm = head_norm("q_norm"), head_norm("k_norm")
        self.o = linear("self_attn.o_proj")
        self.post_norm = RMSNorm(weights[prefix + "post_attention_layernorm.weight"], eps)
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")

    def __call__(self, hidden: torch.Tensor, rows: ForwardBatch) -> torch.Tensor:
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
        self.layers = [FloatDecoderLayer(i, weights, config, attention, dtype) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights["model.norm.weight"], config.rms_norm_eps)
        head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.head = Linear([head], [], dtype)
        self._layers_done = 0
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def last_hidden_states(self) -> np.ndarray:
        return self.norm(self._hidden).float().numpy()

    def layers_done(self) -> int:
        return self._layers_done

    def phase_cycles(self) -> dict[str, int]:
        return {}

    @torch.inference_mode()
    def forward(self, rows: ForwardBatch) -> np.ndarray:
        hidden = self.embedding[torch.from_numpy(rows.token_ids).long()].float()
        for block in self.layers:
            hidden = block(hidden, rows)
            self._layers_done += 1
        self._hidden = hidden
        return self.head(self.norm(hidden[torch.from_numpy(rows.logits_indices)])).numpy()

"""The float family: torch products and norms around our own attention. Only the attention is tuned.

The residual stream, norms, rope and KV are float32; `dtype` is the type of the weights and of what they multiply.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from onward.kernels.cpu.batch_attention import NUM_PHASES, rotate_and_attend, rotate_and_attend_with_options
from onward.kernels.cpu.phases import WORDS_PER_PHASE
from onward.kernels.cpu.threads import KernelThreads
from onward.models.device_support import is_plain
from onward.models.layers.float_mlp import FloatExperts, FloatMlp, Linear, as_tensor
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.kernel_context import (
    fill_batch_fields,
    fill_context,
    fill_model_fields,
    fill_options,
    new_context,
)
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTables
from onward.models.tensor_names import EMBED, FINAL_NORM, FINAL_NORM_BIAS, LM_HEAD, POSITIONS
from onward.proto.model import ModelConfig


class Norm:
    """A norm over the last axis, of the kind `ModelConfig.norm`."""

    def __init__(self, weight: Any, bias: Any | None, config: ModelConfig) -> None:
        self._weight = as_tensor(weight, torch.float32) + config.norm_weight_offset
        self._bias = None if bias is None else as_tensor(bias, torch.float32)
        self._is_layer_norm, self._eps = config.norm == "layer", config.rms_norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_layer_norm:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._weight
        return x if self._bias is None else x + self._bias


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Attention:
    """The part between QKV product and output product: norms of q and k, rope, KV write and attention."""

    def __init__(
        self, config: ModelConfig, rotary: RotaryTables, kv: PagedKV, scratch: AttentionScratch, threads: KernelThreads
    ) -> None:
        self._references = (rotary, kv, scratch)
        self._config, self._rotary = config, rotary
        self._width, self._layer_stride = config.num_heads * config.head_dim, kv.layer_stride
        self._threads = threads
        self._work = np.zeros((NUM_PHASES, WORDS_PER_PHASE), np.int64)
        self._kernel = rotate_and_attend if is_plain(config) else rotate_and_attend_with_options
        self._context = new_context(self._kernel)
        fill_model_fields(self._context, config, rotary.everywhere, kv, scratch, threads)
        fill_options(self._context, config)
        fill_context(self._context, work=self._work)

    def __call__(
        self,
        qkv: torch.Tensor,
        rows: ForwardBatch,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert qkv.is_contiguous()
        out = torch.empty((rows.num_rows, self._width))
        table = self._rotary.of_layer(self._config, layer)
        fill_batch_fields(self._context, rows)
        fill_context(
            self._context, qkv=qkv.data_ptr(), attended=out.data_ptr(), kv_at=layer * self._layer_stride,
            q_norm=_address(q_norm), k_norm=_address(k_norm), sinks=_address(sinks),
            cos=0 if table is None else table.cos, sin=0 if table is None else table.sin,
            window=self._config.layer(layer).window or 0,
        )  # fmt: skip
        self._work[:] = 0
        self._threads.run(self._kernel, self._context)
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
        prefix = f"model.layers.{index}."

        def linear(*names: str, biased: bool = False) -> Linear:
            biases = [weights[f"{prefix}{name}.bias"] for name in names] if biased else []
            return Linear([weights[f"{prefix}{name}.weight"] for name in names], biases, dtype)

        def norm(name: str, exists: bool) -> Callable[[torch.Tensor], torch.Tensor]:
            if not exists:
                return _identity
            bias = weights[f"{prefix}{name}.bias"] if config.norm_bias else None
            return Norm(weights[f"{prefix}{name}.weight"], bias, config)

        def vector(name: str, exists: bool, offset: float = 0.0) -> torch.Tensor | None:
            return as_tensor(weights[f"{prefix}self_attn.{name}"], torch.float32) + offset if exists else None

        self.index, self.attention, self._config = index, attention, config
        self.input_norm = norm("input_layernorm", config.pre_norm and has_input_norm)
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", biased=config.qkv_bias)
        self.q_norm = vector("q_norm.weight", config.qk_norm, config.norm_weight_offset)
        self.k_norm = vector("k_norm.weight", config.qk_norm, config.norm_weight_offset)
        self.sinks = vector("sinks", config.attention_sinks)
        self.o: Callable[[torch.Tensor], torch.Tensor] = linear("self_attn.o_proj", biased=config.o_bias)
        self.attention_output_norm = norm("attention_output_norm", config.post_norm)
        self.post_norm = norm("post_attention_layernorm", config.pre_norm)
        experts = config.layer_experts(index)
        self.mlp: Callable[[torch.Tensor], torch.Tensor] = (
            FloatMlp(weights, f"{prefix}mlp", config, dtype)
            if experts is None
            else FloatExperts(weights, f"{prefix}mlp", config, experts, dtype)
        )
        self.mlp_output_norm = norm("mlp_output_norm", config.post_norm)

    def __call__(self, hidden: torch.Tensor, rows: ForwardBatch) -> torch.Tensor:
        attended = self.attention_output_norm(self._attend(self.input_norm(hidden), rows))
        residual = hidden + self._scaled(attended)
        seen = hidden if self._config.parallel_block else residual
        return residual + self._scaled(self.mlp_output_norm(self.mlp(self.post_norm(seen))))

    def _attend(self, x: torch.Tensor, rows: ForwardBatch) -> torch.Tensor:
        return self.o(self.attention(self.qkv(x), rows, self.index, self.q_norm, self.k_norm, self.sinks))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        multiplier = self._config.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier


class FloatModel:
    """The layers of a model, with its embedding, last norm and head."""

    def __init__(
        self, weights: Mapping[str, Any], config: ModelConfig, attention: Attention, dtype: torch.dtype
    ) -> None:
        self._config = config
        self.embedding = as_tensor(weights[EMBED], dtype)
        self.embed_tokens: Callable[[torch.Tensor], torch.Tensor] = self._rows_of_embedding
        self.positions = as_tensor(weights[POSITIONS], torch.float32) if config.learned_positions else None
        self.layers = [FloatDecoderLayer(i, weights, config, attention, dtype) for i in range(config.num_layers)]
        self.norm = Norm(weights[FINAL_NORM], weights[FINAL_NORM_BIAS] if config.norm_bias else None, config)
        head = self.embedding if config.tie_word_embeddings else weights[LM_HEAD]
        self.head: Callable[[torch.Tensor], torch.Tensor] = Linear([head], [], dtype)
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
        hidden = self._embed(rows)
        for block in self.layers:
            hidden = block(hidden, rows)
            self._layers_done += 1
        self._hidden = hidden
        logits = self.head(self.norm(hidden[torch.from_numpy(rows.logits_indices)]))
        return self._cap(logits).numpy()

    def _rows_of_embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids.long()]

    def _embed(self, rows: ForwardBatch) -> torch.Tensor:
        hidden = self.embed_tokens(torch.from_numpy(rows.token_ids)).float()
        if self._config.embedding_multiplier != 1.0:
            hidden = hidden * self._config.embedding_multiplier
        if self.positions is not None:
            hidden = hidden + self.positions[torch.from_numpy(rows.positions).long()]
        return hidden

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        if self._config.logits_multiplier != 1.0:
            logits = logits * self._config.logits_multiplier
        cap = self._config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

"""One decoder for every dense model of the Llama line. What differs between them is data in `ModelConfig`.

Two families of layers can fill it: floats around torch, and int8 without torch. Both read the same `ForwardBatch`, write
the same `PagedKV`, and answer with the logits of the rows that were asked for.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.models.device_support import check_supported, device_kind, head_unit
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTables
from onward.proto.model import PreparedModel


class DecoderModel(Protocol):
    def forward(self, rows: ForwardBatch) -> np.ndarray:
        """Computes every row, writes its key and value, and returns float32 logits [sampled rows, >= vocab_size].

        The array may be overwritten by the next call.
        """
        ...

    def last_hidden_states(self) -> np.ndarray:
        """Of every row of the last call: what the head reads, float32 [rows, hidden_size]."""
        ...

    def layers_done(self) -> int:
        """How many layers have written all their keys and values, since the beginning: `num_layers` more after each
        call. Another thread may ask while a call runs."""
        ...

    def phase_cycles(self) -> dict[str, int]:
        """What the last call spent its time on, by kind of work, where the family can tell."""
        ...


def build_decoder(
    model: PreparedModel,
    weights: Mapping[str, Any],
    kv: PagedKV,
    *,
    max_model_len: int,
    max_rows: int,
    max_sampled: int,
    threads: ThreadPool,
) -> DecoderModel:
    config = model.config
    check_supported(config, device_kind("cpu", model.quantization))
    assert config.head_dim % head_unit(model.quantization) == 0, "the caller has padded the heads"
    rotary = RotaryTables.build(config, max_model_len)
    if model.quantization == "int8":
        from onward.models.layers.int8_layers import TILE_SCRATCH, Int8Model

        scratch = AttentionScratch.allocate(config, max_model_len, threads.size, TILE_SCRATCH)
        return Int8Model(weights, config, rotary, kv, scratch, threads, max_rows=max_rows, max_sampled=max_sampled)
    import torch

    from onward.models.layers.float_layers import Attention, FloatModel

    torch.set_num_threads(threads.size)
    scratch = AttentionScratch.allocate(config, max_model_len, threads.size)
    attention = Attention(config, rotary, kv, scratch, threads)
    return FloatModel(weights, config, attention, getattr(torch, model.dtype))

"""One decoder on the CPU for all models. They differ only in the data of `ModelConfig`.

Two families of layers implement it: float layers with torch, and int8 layers without torch. Both read the same
`ForwardBatch`, write the same `PagedKV`, and return the logits of the requested rows.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onward.kernels.cpu.threads import KernelThreads
from onward.models.device_support import check_supported, device_kind, head_unit
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTables
from onward.models.layers.step_arrays import StepArrays
from onward.proto.model import PreparedModel

if TYPE_CHECKING:
    from onward.models.sharding.rank_exchange import RankExchange


class DecoderModel(Protocol):
    def forward(self, rows: ForwardBatch) -> np.ndarray:
        """Computes every row, writes its key and value, and returns float32 logits [sampled rows, >= vocab_size].

        The array may be overwritten by the next call.
        """
        ...

    def last_hidden_states(self) -> np.ndarray:
        """Returns the input of the head for every row of the last call, float32 [rows, hidden_size]."""
        ...

    def layers_done(self) -> int:
        """Returns how many layers have written all their keys and values, summed over all calls: each call adds
        `num_layers`. Another thread may call this while `forward` runs."""
        ...

    def phase_cycles(self) -> dict[str, int]:
        """Returns the cycles that the last call spent on each kind of work; empty if the family does not measure
        them."""
        ...


def build_decoder(
    model: PreparedModel,
    weights: Mapping[str, Any],
    kv: PagedKV,
    *,
    max_model_len: int,
    max_rows: int,
    max_sampled: int,
    threads: KernelThreads,
    shared: StepArrays | None = None,
    exchange: "RankExchange | None" = None,
    vocab_size: int | None = None,
) -> DecoderModel:
    """Returns the decoder of a model on the CPU. `shared` allocates arrays that all ranks of a group share, for int8.
    `exchange` connects the ranks of a float model, of which `model` is this rank's part, and `vocab_size` the whole
    vocabulary. None: there is one rank."""
    config = model.config
    check_supported(config, device_kind("cpu", model.quantization))
    assert config.head_dim % head_unit(model.quantization) == 0, "the caller has padded the heads"
    rotary = RotaryTables.build(config, max_model_len)
    if model.quantization == "int8":
        from onward.models.layers.int8_layers import TILE_SCRATCH, Int8Model

        scratch = AttentionScratch.allocate(config, max_model_len, threads.size, TILE_SCRATCH)
        return Int8Model(
            weights, config, rotary, kv, scratch, threads, max_rows=max_rows, max_sampled=max_sampled, shared=shared
        )
    assert shared is None, "ranks of a float model share no arrays"
    import torch

    from onward.models.layers.float_layers import Attention, FloatModel

    torch.set_num_threads(threads.size)
    scratch = AttentionScratch.allocate(config, max_model_len, threads.size)
    attention = Attention(config, rotary, kv, scratch, threads)
    decoder = FloatModel(weights, config, attention, getattr(torch, model.dtype))
    if exchange is not None:
        from onward.models.sharding.parallel_float_model import make_parallel

        make_parallel(decoder, vocab_size or config.vocab_size, exchange)
    return decoder

"""The fields about rows and KV in the context of every kernel over a batch. They come from
`models.layers.forward_batch.ForwardBatch` and `models.layers.paged_kv`.

Addresses are int64; comments beside them give the type of the memory there.
"""

from typing import Any, NamedTuple

import numpy as np

BATCH_FIELDS: list[tuple[str, type]] = [
    ("num_rows", np.int64),
    ("num_tiles", np.int64),
    ("positions", np.int64),  # int32 [rows]
    ("pages", np.int64),  # int32 [rows]
    ("tiles", np.int64),  # int32 [tiles, 4]
    ("block_tables", np.int64),  # int32 [slots, table_stride]
    ("table_stride", np.int64),
    ("num_heads", np.int64),
    ("num_kv_heads", np.int64),
    ("head_dim", np.int64),
    ("kv", np.int64),  # float32 or int8, see kv_layout
    ("block_size", np.int64),
    ("cos", np.int64),  # float32 [positions, head_dim / 2]
    ("sin", np.int64),
    ("qkv", np.int64),  # float32 [rows, (heads + 2 * kv heads) * head_dim]
    ("attended", np.int64),  # float32 [rows, heads * head_dim]
    ("scratch", np.int64),  # float32 [threads, scratch_stride]
    ("scratch_stride", np.int64),
    ("num_lots", np.int64),  # see phases
    ("work", np.int64),  # int64, see phases; zeroed before each run
    ("eps", np.float32),
    # Used by models with `AttentionOptions` only.
    ("true_head_dim", np.int64),  # without padding
    ("rotary_half", np.int64),  # half of the rotated dimensions of a head
    ("norm_is_whole", np.int64),  # whether the norm of q and k is over all heads together
    ("query_factor", np.float32),  # factor of q, beside 1 / sqrt(head_dim)
    ("softcap", np.float32),  # soft-cap of scores; 0: none
]


class AttentionOptions(NamedTuple):
    """How attention of one layer differs from a Llama's. For a Llama, kernels get None instead, and are compiled
    without these operations."""

    window: Any
    """Positions that a row attends to, its own included; 0: all."""
    sinks: Any
    """The address of a score per head that takes part in the softmax; 0: none."""
    cos: Any
    """The address of the table; 0: the layer has no rotary embedding."""
    sin: Any
    rotary_half: Any
    true_head_dim: Any
    norm_is_whole: Any
    query_factor: Any
    softcap: Any

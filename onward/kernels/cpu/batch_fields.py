"""What every kernel over a batch is told about rows and KV: the fields of `models.layers.forward_batch.ForwardBatch` and
`models.layers.paged_kv`.

Addresses are int64; what lies there is said beside them.
"""

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
]

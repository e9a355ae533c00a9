"""The rows of a step as arrays, as the model reads them.

rows      one token each; the rows of a slot are consecutive, slots follow each other
tiles     (first row, rows, slot, position of the first row): rows of one slot that attention handles together
sampled   the rows whose logits are requested
"""

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class ForwardBatch:
    num_rows: int
    token_ids: np.ndarray
    positions: np.ndarray
    kv_block_ids: np.ndarray
    """The KV block that each row's own key and value go to."""
    tiles: np.ndarray
    logits_indices: np.ndarray
    block_tables: np.ndarray
    """[slots, blocks]: the KV blocks of each slot's history."""

"""What a step computes, as arrays: the form in which the worker's batch reaches the model.

rows      one token each; those of a slot are consecutive, slots follow each other
tiles     (first row, rows, slot, position of the first row): rows of one slot that attention handles together
sampled   the rows whose logits are wanted
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
    """[slots, blocks]: where each slot's history is."""

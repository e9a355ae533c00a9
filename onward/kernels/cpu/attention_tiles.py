"""Tiles: consecutive positions of one slot that attention handles together, and the memory it needs for that."""

MAX_SHARED_ROWS = 24
"""(row, head) pairs that share a loaded key in a full tile. More would spill the scratch out of the L2 cache."""


def row_tile(group_size: int) -> int:
    """Rows per tile, when each key serves `group_size` heads."""
    return max(1, min(16, MAX_SHARED_ROWS // group_size))


def score_stride(num_keys: int) -> int:
    """Of a pair's scores: whole groups of 64, padded so that the rows of a long context do not fall on the same cache
    sets."""
    return (num_keys + 63) // 64 * 64 + 16


def scratch_size(group_size: int, head_dim: int, max_model_len: int) -> int:
    """Floats that one thread needs, for either type of KV; `attention` and `int8_attention` say what for."""
    pairs = row_tile(group_size) * group_size
    stride = score_stride(max_model_len)
    per_position = stride + 2 * (stride // 16)
    return per_position + 16 * head_dim + pairs * (2 * head_dim + stride + stride // 64 + 8)

"""Sizes of tiles and of their scratch memory. A tile is a run of positions of one slot that attention handles
together."""

MAX_SHARED_ROWS = 24
"""(row, head) pairs that share a loaded key in a full tile. With more, the scratch would not fit into the L2 cache."""


def row_tile(group_size: int) -> int:
    """Returns the rows per tile when each key serves `group_size` heads."""
    return max(1, min(16, MAX_SHARED_ROWS // group_size))


def score_stride(num_keys: int) -> int:
    """Returns the stride of a pair's scores: whole groups of 64, padded so that the rows of a long context do not fall
    on the same cache sets."""
    return (num_keys + 63) // 64 * 64 + 16


def scratch_size(group_size: int, head_dim: int, max_model_len: int) -> int:
    """Returns the number of floats that one thread needs, for either type of KV; see `attention` and
    `int8_attention`."""
    pairs = row_tile(group_size) * group_size
    stride = score_stride(max_model_len)
    per_position = stride + 2 * (stride // 16)
    return per_position + 16 * head_dim + pairs * (2 * head_dim + stride + stride // 64 + 8)

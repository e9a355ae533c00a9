"""What the float path calls: rope with KV write, and attention, each over a whole batch. int8 has its own, fused.

Arrays are flat. `tiles` holds (first row, rows, slot, position) per tile; `work` is a counter from which threads draw.
"""

import numba
import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.attention import attend_tile
from onward.kernels.cpu.jit import kernel
from onward.kernels.cpu.rope import rotate_and_store


@kernel
def rope_and_store(qkv, num_rows, positions, pages, block_size, num_heads, num_kv_heads, head_dim, cos, sin,
                   q_norm, k_norm, eps, kv, kv_at):  # fmt: skip
    width = (num_heads + 2 * num_kv_heads) * head_dim
    for row in numba.prange(num_rows):
        rotate_and_store(qkv, row * width, np.int64(positions[row]), np.int64(pages[row]), block_size, num_heads,
                         num_kv_heads, head_dim, cos, sin, q_norm, k_norm, eps, kv, kv_at)  # fmt: skip


@kernel
def paged_attention(qkv, kv, kv_at, block_tables, table_stride, block_size, tiles, num_tiles, num_heads,
                    num_kv_heads, head_dim, scale, scratch, scratch_stride, work, num_threads, out):  # fmt: skip
    """Threads draw (tile, kv head) pairs; the last tiles are drawn first, since they tend to be the longest."""
    group_size = num_heads // num_kv_heads
    q_stride = (num_heads + 2 * num_kv_heads) * head_dim
    num_items = num_tiles * num_kv_heads
    work[0] = 0
    for thread in numba.prange(num_threads):
        item = simd.fetch_add(work, 0, 1)
        while item < num_items:
            tile_at = (num_tiles - 1 - item // num_kv_heads) * 4
            table_at = np.int64(tiles[tile_at + 2]) * table_stride
            attend_tile(qkv, q_stride, kv, kv_at, block_tables, table_at, block_size, tiles, tile_at,
                        item % num_kv_heads, num_kv_heads, group_size, head_dim, scale, scratch,
                        thread * scratch_stride, out, num_heads * head_dim)  # fmt: skip
            item = simd.fetch_add(work, 0, 1)

"""The operations between the qkv product and attention: norms of q and k, rotary embedding, and the write into paged
KV."""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.kv_layout import POSITIONS_PER_RECORD, record_at, record_size_of, store_key, store_value


@inlined_kernel_function
def mean_square(x, at, size):
    """Returns the mean of the squares, by sixteen running sums that are folded at the end. `size` is a multiple of
    16."""
    total = simd.splat(np.float32(0.0))
    for i in range(0, size, 16):
        v = simd.load(x, at + i)
        total = simd.fma(v, v, total)
    return simd.sum_lanes(total) / np.float32(size)


@inlined_kernel_function
def _normalize_head(x, at, weight, head_dim, eps):
    inverse = np.float32(1.0) / np.sqrt(mean_square(x, at, head_dim) + eps)
    for i in range(head_dim):
        x[at + i] = x[at + i] * inverse * weight[i]


@inlined_kernel_function
def _rotate_head(x, at, cos, sin, angle_at, half):
    for i in range(half):
        low, high = x[at + i], x[at + half + i]
        c, s = cos[angle_at + i], sin[angle_at + i]
        x[at + i] = low * c - high * s
        x[at + half + i] = high * c + low * s


@inlined_kernel_function
def _normalize_part(x, at, weight, size, num_true, eps):
    """Applies the norm to `size` values, of which `num_true` are not padding (which is zero)."""
    mean = mean_square(x, at, size) * (np.float32(size) / np.float32(num_true))
    inverse = np.float32(1.0) / np.sqrt(mean + eps)
    for i in range(size):
        x[at + i] = x[at + i] * inverse * weight[i]


@kernel_function
def _prepare_heads(qkv, at, position, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps, options):
    """Applies norms, rope and scale to all heads of q and k of one row, as `options` say."""
    out_of_line()
    true_dim, half = options.true_head_dim, options.rotary_half
    k_at = at + num_heads * head_dim
    if q_norm != 0 and options.norm_is_whole != 0:
        _normalize_part(qkv, at, simd.floats(q_norm), num_heads * head_dim, num_heads * true_dim, eps)
        _normalize_part(qkv, k_at, simd.floats(k_norm), num_kv_heads * head_dim, num_kv_heads * true_dim, eps)
    for head in range(num_heads + num_kv_heads):
        if q_norm != 0 and options.norm_is_whole == 0:
            weight = simd.floats(q_norm if head < num_heads else k_norm)
            _normalize_part(qkv, at + head * head_dim, weight, head_dim, true_dim, eps)
        if options.cos != 0:
            _rotate_head(qkv, at + head * head_dim, simd.floats(options.cos), simd.floats(options.sin),
                         position * half, half)  # fmt: skip
    for i in range(num_heads * head_dim):
        qkv[at + i] = qkv[at + i] * options.query_factor


@kernel_function
def rotate_and_store(qkv, at, position, page, block_size, num_heads, num_kv_heads, head_dim, cos, sin,
                     q_norm, k_norm, eps, kv, kv_at, options):  # fmt: skip
    """Normalizes and rotates q and k of one row in place, and copies k and v into their page.

    `q_norm` and `k_norm` are the addresses of the norms' weights, 0 where the model has none.
    """
    out_of_line()
    if options is None:
        half = head_dim // 2
        angle_at = position * half
        for head in range(num_heads + num_kv_heads):
            if q_norm != 0:
                weight = simd.floats(q_norm if head < num_heads else k_norm)
                _normalize_head(qkv, at + head * head_dim, weight, head_dim, eps)
            _rotate_head(qkv, at + head * head_dim, cos, sin, angle_at, half)
    else:
        _prepare_heads(qkv, at, position, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps, options)
    lane, part = position % POSITIONS_PER_RECORD, position % block_size // POSITIONS_PER_RECORD
    size = record_size_of(head_dim, simd.itemsize(kv))
    for head in range(num_kv_heads):
        record = kv_at + record_at(page, head, part, num_kv_heads, block_size // POSITIONS_PER_RECORD, size)
        key_from = at + (num_heads + head) * head_dim
        store_key(kv, record, lane, qkv, key_from, head_dim)
        store_value(kv, record, lane, qkv, key_from + num_kv_heads * head_dim, head_dim)

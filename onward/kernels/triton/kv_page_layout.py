"""The layout of keys and values in a device's memory.

    one layer   bfloat16 [num_blocks, 2, num_kv_heads, block_size, head_dim]        0: keys, 1: values
    a page      one block of one layer: keys of head 0, of head 1, …, then values likewise; contiguous

The order of layers, blocks and bytes is that of the CPU's pool (`pd.transfer.page_geometry`), so a page is one copy
when KV moves between machines. Within a page a head's keys are one run of block_size * head_dim elements (4 KiB for
blocks of 16 and heads of 128). An attention program works for one KV head, so it reads whole runs and nothing of other
heads.
"""

import torch


def check_kv_layout(kv: torch.Tensor) -> None:
    """Asserts the layout. Kernels compute offsets from the shape alone, so a view with other strides would be read
    wrongly."""
    assert kv.dim() == 5
    assert kv.shape[1] == 2
    assert kv.is_contiguous()
    assert kv.shape[3] & (kv.shape[3] - 1) == 0, "blocks of a power of two positions"

"""Fills a kernel's context with sizes and with addresses of arrays. The caller keeps the arrays alive."""

from typing import Any

import numpy as np

from onward.kernels.cpu.jit import Kernel
from onward.kernels.cpu.phases import MAX_PARTITIONS
from onward.kernels.cpu.threads import KernelThreads
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTable
from onward.proto.model import ModelConfig


def new_context(kernel: Kernel) -> np.ndarray:
    return np.zeros((), kernel.context)


def fill_context(context: np.ndarray, **fields: Any) -> None:
    """Sets fields of the context: arrays as their addresses, other values as they are."""
    for name, value in fields.items():
        context[name] = value.ctypes.data if isinstance(value, np.ndarray) else value


def fill_model_fields(
    context: np.ndarray,
    config: ModelConfig,
    rotary: RotaryTable,
    kv: PagedKV,
    scratch: AttentionScratch,
    threads: KernelThreads,
) -> None:
    """Sets the fields that are the same for all steps."""
    fill_context(
        context, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        eps=config.rms_norm_eps, cos=rotary.cos, sin=rotary.sin, kv=kv.data, block_size=kv.block_size,
        scratch=scratch.buffer, scratch_stride=scratch.stride, num_lots=min(threads.size, MAX_PARTITIONS),
    )  # fmt: skip


def fill_options(context: np.ndarray, config: ModelConfig) -> None:
    """Sets the options that are the same for all layers. `query_factor` is relative to 1 / sqrt(head_dim), by which
    `attend_tile` itself multiplies."""
    fill_context(
        context, true_head_dim=config.true_head_dim, rotary_half=config.rotated_dim // 2,
        norm_is_whole=config.qk_norm_is_whole, query_factor=config.attention_scale * config.head_dim**0.5,
        softcap=config.attention_softcap or 0.0,
    )  # fmt: skip


def fill_batch_fields(context: np.ndarray, rows: ForwardBatch) -> None:
    fill_context(
        context, num_rows=rows.num_rows, num_tiles=len(rows.tiles), positions=rows.positions, pages=rows.kv_block_ids,
        tiles=rows.tiles, block_tables=rows.block_tables, table_stride=rows.block_tables.shape[1],
    )  # fmt: skip

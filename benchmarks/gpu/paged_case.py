"""Random paged histories on the device. Everything a kernel must not read, or must write, is NaN beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

DEVICE = "cuda"
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


QWEN3_0_6B = Heads(16, 8, 128)
QWEN3_8B = Heads(32, 8, 128)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE, non_blocking=True)


def block_tables(lengths: Sequence[int], block_size: int) -> tuple[torch.Tensor, int]:
    """Blocks in a random order, none of them twice; and how many there are. Unused entries name no block."""
    counts = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(counts) + 1, device=DEVICE).int()
    tables = torch.full((len(lengths), max(counts) + 3), 2**30, dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(ids[: sum(counts)].split(counts)):
        tables[row, : len(part)] = part
    return tables, sum(counts) + 1


def filled_pages(
    lengths: Sequence[int], tables: torch.Tensor, num_blocks: int, heads: Heads, block_size: int
) -> torch.Tensor:
    """Random keys and values; NaN behind the end of each history and in the block that no row has."""
    kv = random(num_blocks, 2, heads.num_kv_heads, block_size, heads.dim)
    is_used = torch.zeros(num_blocks, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        is_used[tables[row, :blocks].long()] = True
        if length % block_size:
            kv[int(tables[row, blocks - 1]), :, :, length % block_size :] = NAN
    kv[~is_used] = NAN
    return kv


def plain_pages(batch: int, length: int, heads: Heads, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv, tables) for timings: equal lengths, blocks in a random order."""
    per_row = -(-length // block_size)
    tables = torch.randperm(batch * per_row, device=DEVICE).int().view(batch, per_row)
    kv = torch.empty(
        (batch * per_row, 2, heads.num_kv_heads, block_size, heads.dim), dtype=torch.bfloat16, device=DEVICE
    )
    return kv.normal_(), tables


def rotary_tables(positions: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1e6 ** (-torch.arange(0, dim, 2, device=DEVICE, dtype=torch.float64) / dim)
    angles = torch.arange(positions, device=DEVICE, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max |a - b| / max |b|; infinite where anything found is not a number."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.double() - expected).abs().max() / expected.abs().max())

"""A Qwen3 shape with random weights, its KV pages, and the state of a batch of streams, all on the device."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.paged_case import DEVICE, rotary_tables
from benchmarks.gpu.shapes import Shape
from onward.kernels.triton.sampling import SampleInputs

EPS = 1e-6


def weight(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=shape[-1] ** -0.5)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16, device=DEVICE)


def rows_of(count: int, size: int) -> torch.Tensor:
    return torch.empty((count, size), dtype=torch.bfloat16, device=DEVICE)


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor]
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    kv: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, num_blocks: int, block_size: int) -> "Layer":
        heads = shape.heads
        kv = torch.empty(
            (num_blocks, 2, heads.num_kv_heads, block_size, heads.dim), dtype=torch.bfloat16, device=DEVICE
        )
        return cls(
            ones(shape.hidden),
            weight(heads.qkv_width, shape.hidden),
            (ones(heads.dim), ones(heads.dim)),
            weight(shape.hidden, heads.num_heads * heads.dim),
            ones(shape.hidden),
            weight(2 * shape.mlp, shape.hidden),
            weight(shape.hidden, shape.mlp),
            kv.normal_(),
        )


class Model:
    def __init__(self, shape: Shape, num_blocks: int, max_length: int, block_size: int = 16) -> None:
        self.shape, self.block_size, self.max_length = shape, block_size, max_length
        self.layers = [Layer.random(shape, num_blocks, block_size) for _ in range(shape.num_layers)]
        self.embedding = weight(shape.vocab, shape.hidden)
        self.norm = ones(shape.hidden)
        self.rotary = rotary_tables(max_length, shape.heads.dim)
        self.following_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]


@dataclass(slots=True)
class Streams:
    """One row per stream. Kernels of a step read and advance it, so that steps need nothing from the host."""

    tables: torch.Tensor
    lengths: torch.Tensor
    """Tokens known, the newest one, whose key and value are not computed yet, included. 0: no stream."""
    token_ids: torch.Tensor
    is_valid: torch.Tensor
    inputs: SampleInputs

    @classmethod
    def start(cls, tables: torch.Tensor, lengths: torch.Tensor, vocab: int) -> "Streams":
        count = len(lengths)
        numbers = torch.arange(count, device=DEVICE)
        return cls(
            tables,
            lengths,
            torch.randint(vocab, (count,), device=DEVICE),
            torch.zeros(count, dtype=torch.uint8, device=DEVICE),
            SampleInputs(
                torch.full((count,), 0.6, device=DEVICE), numbers, torch.zeros_like(numbers), torch.zeros_like(numbers)
            ),
        )

    @property
    def per_row(self) -> list[torch.Tensor]:
        inputs = self.inputs
        state = [self.tables, self.lengths, self.token_ids, self.is_valid]
        return [*state, inputs.temperatures, inputs.seeds, inputs.choices, inputs.positions]

    def keep(self, rows: torch.Tensor) -> None:
        """Moves these rows to the front, in this order, and ends the others."""
        for tensor in self.per_row:
            tensor[: len(rows)] = tensor[rows]
        self.lengths[len(rows) :] = 0

"""What a step on a device is made of: its operations as an interface, and the tensors that they share.

Two things fill it: `triton.ops`, which is fast, and `torch_ops`, which is plain and runs anywhere, so that everything above
is tested without a device. Knows tensors, not requests, plans or models.

    slot   where a request's state lies: its tokens, its block table, how it draws
    row    one line of a step's matrices
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights for the heads of q and of k: as many as a head has dimensions without padding."""
Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [positions, rotated dimensions / 2]. Dimensions of a head behind those stay as they are."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

FP8_MAX = 448.0
"""Of float8 e4m3."""

NUM_ROW_INPUTS = 3
"""Of a row that decodes or samples: its slot, how many tokens are known, and a block that its table gets (or -1)."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm of the rows of a matrix: RMSNorm, or LayerNorm where it `centers`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    centers: bool = False
    count: int | None = None
    """Columns that are not padding, where some are: padding is zero and does not count for the mean."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How attention makes weights of the products of queries and keys."""

    scale: float
    window: int | None = None
    """Positions that a token attends to, its own included. Nothing before them is read, neither keys nor tables."""
    softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: a score of each head that takes part in the softmax and has no value."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer does between its QKV product and its output product."""

    scoring: Scoring
    rotary: Rotary | None
    norms: Norms | None
    eps: float


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """What decides each slot's next token. The last slot is nobody's: rows that only fill a batch up belong to it."""

    tokens: torch.Tensor
    """int32 [slots, max_model_len + 1]: all known tokens."""
    tables: torch.Tensor
    """int32 [slots, blocks]."""
    int_params: torch.Tensor
    """int64 [3, slots]: seeds, choices, lengths of prompts."""
    float_params: torch.Tensor
    """float32 [4, slots]: temperatures, top_ps, min_ps, top_ks (0: all)."""

    @classmethod
    def allocate(cls, num_slots: int, max_tokens: int, max_blocks: int, device: str) -> "SlotTensors":
        return cls(
            torch.zeros((num_slots, max_tokens), dtype=torch.int32, device=device),
            torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device),
            torch.zeros((3, num_slots), dtype=torch.int64, device=device),
            torch.zeros((4, num_slots), dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The rows of a step that sample; those that decode come first. Filled from their slots when the step begins."""

    inputs: torch.Tensor
    """int32 [3, rows], from the host."""
    token_ids: torch.Tensor
    """int32: the newest token of each."""
    tables: torch.Tensor
    """int32 [rows, blocks]."""
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor
    """int64: index in the output of the token to be drawn."""
    sampled: torch.Tensor
    """int32 [2, rows]: the token, and whether there is one (1) or the logits are not numbers (0)."""

    @classmethod
    def allocate(cls, rows: int, max_blocks: int, device: str) -> "RowTensors":
        def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((*shape, rows), dtype=dtype, device=device)

        return cls(
            inputs=of(torch.int32, NUM_ROW_INPUTS),
            token_ids=of(torch.int32),
            tables=torch.zeros((rows, max_blocks), dtype=torch.int32, device=device),
            temperatures=of(torch.float32),
            top_ps=of(torch.float32),
            min_ps=of(torch.float32),
            top_ks=of(torch.int32),
            seeds=of(torch.int64),
            choices=of(torch.int64),
            positions=of(torch.int64),
            sampled=of(torch.int32, 2),
        )

    @property
    def slots(self) -> torch.Tensor:
        return self.inputs[0]

    @property
    def lengths(self) -> torch.Tensor:
        return self.inputs[1]

    @property
    def new_blocks(self) -> torch.Tensor:
        return self.inputs[2]

    def first(self, count: int) -> "RowTensors":
        """A view of the first rows."""
        return RowTensors(
            self.inputs[:, :count], self.token_ids[:count], self.tables[:count], self.temperatures[:count],
            self.top_ps[:count], self.min_ps[:count], self.top_ks[:count], self.seeds[:count], self.choices[:count],
            self.positions[:count], self.sampled[:, :count],
        )  # fmt: skip


class Ops(Protocol):
    """Matrices have one row per token. `out` is written; nothing else is, unless it is said."""

    tile_rows: int
    """Query rows of one tile of chunk attention, for chunks of more than one token."""

    def reserve(self, heads: HeadShape, max_num_seqs: int, max_sampled: int, vocab_size: int, device: str) -> None:
        """Allocates what attention and sampling need beside their arguments: before the rest of the memory is given to the
        KV pool, and once, since captured graphs know where it lies. `max_sampled`: rows with logits in one step."""
        ...

    def load_rows(self, slots: SlotTensors, rows: RowTensors, block_size: int) -> None:
        """Gives tables their new blocks, then fills `rows` from the slots."""
        ...

    def append_sampled_tokens(self, slots: SlotTensors, rows: RowTensors) -> None:
        """Puts what was drawn behind the slots' tokens."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """residual += x; out = norm(residual)."""
        ...

    def norm(self, x: torch.Tensor, norm: NormWeights, eps: float, out: torch.Tensor) -> None:
        """Of any kind. `out` may be `x`."""
        ...

    def add_scaled(self, x: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        """residual += factor * x."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None: ...

    def activate(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """activation(x); where x has twice the columns of `out`, it is activation(gate) * up, gates first."""
        ...

    def finish_logits(self, logits: torch.Tensor, multiplier: float, softcap: float | None) -> None:
        """In place: times the multiplier, then cap * tanh(logits / cap)."""
        ...

    def decode_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, rows: RowTensors, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """Norm of heads, rotary embedding, KV write and attention of one new token per row. `rows` are those of `qkv`."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, layer: AttentionLayer
    ) -> None:
        """Norm of heads and rotary embedding of queries, in place; keys and values go to their pages."""
        ...

    def chunk_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, num_heads: int,
        scoring: Scoring, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Of the queries in `qkv`, whose keys are in their pages. `tiles` as `chunk_tiles` makes them. In a fixed order a
        row has the bits that `decode` gives it."""
        ...

    def matmul(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """x times the weight [outputs, inputs]; float8 weights have a scale for each output."""
        ...

    def invariant_linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """The same without bias and scales, with bits that do not depend on the other rows. Rows that lie behind `out` in
        its buffer may be overwritten."""
        ...

    def invariant_gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`linear` and `silu_and_mul`: the weight holds gates, then ups. `gate_up` may be overwritten."""
        ...

    def single_row_linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, *,
        norm: tuple[torch.Tensor, float] | None = None, adds: bool = False, gates: bool = False,
    ) -> None:  # fmt: skip
        """The same for one row, which is normed before, or whose product is added to `out`."""
        ...

    def sample(self, logits: torch.Tensor, rows: RowTensors, *, with_cuts: bool) -> None:
        """Draws for each row. Without cuts, no row has any."""
        ...

    def apply_token_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """In these rows (int64) of float32 logits, tokens whose bit is not set (uint8, lowest first) get minus infinity."""
        ...

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """The logarithm of the sum of exponentials of each row of float32 logits, in float64 [rows]. A row's bits do not
        depend on the other rows."""
        ...

    def accumulate_rows(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """total (float64) += each row, one after the other."""
        ...

"""The operations of a step on a device as an interface, and the tensors that they share.

There are two implementations: `triton.triton_ops`, which is fast, and `torch_ops`, which is plain and runs anywhere, so
that everything above is tested without a device. This module is independent of requests, plans and models.

    slot   the place of a request's state: its tokens, its block table, its sampling parameters
    row    one row of a step's matrices
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights for the heads of q and of k: as many as a head has dimensions without padding."""
Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [positions, rotated dimensions / 2]. Further dimensions of a head are not rotated."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

FP8_MAX = 448.0
"""The largest number of float8 e4m3."""

NUM_ROW_INPUTS = 3
"""Inputs of a row that decodes or samples: its slot, its number of known tokens, and a new block for its table (or
-1)."""


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
    """Columns without padding, if there is padding. Padding is zero and does not count for the mean."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How attention makes weights of the products of queries and keys."""

    scale: float
    window: int | None = None
    """Positions that a token attends to, its own included. Neither keys nor table entries before them are read."""
    softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: a score of each head that takes part in the softmax and has no value."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The operations of one layer between its QKV product and its output product."""

    scoring: Scoring
    rotary: Rotary | None
    norms: Norms | None
    eps: float


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """The state that decides each slot's next token. The last slot has no request; padding rows of a batch use it."""

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
    """The tensors of a step's rows that sample a token: first the decoding rows, at the end padding rows if any.
    `load_rows` fills them from the rows' slots, except `inputs`, which the host uploads, and `sampled`, the
    result."""

    inputs: torch.Tensor
    """int32 [3, rows], from the host."""
    token_ids: torch.Tensor
    """int32: the newest token of each row."""
    tables: torch.Tensor
    """int32 [rows, blocks]."""
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor
    """int64: index in the output of the token to be sampled."""
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
        """Returns a view of the first rows."""
        return RowTensors(
            self.inputs[:, :count], self.token_ids[:count], self.tables[:count], self.temperatures[:count],
            self.top_ps[:count], self.min_ps[:count], self.top_ks[:count], self.seeds[:count], self.choices[:count],
            self.positions[:count], self.sampled[:, :count],
        )  # fmt: skip


class Ops(Protocol):
    """The operations. Matrices have one row per token. Only `out` is written, unless a method says otherwise."""

    device_kind: Literal["torch", "cuda"]
    """Name of devices with these operations in `models.device_support`."""
    tile_rows: int
    """Query rows of one tile of chunk attention, for chunks of more than one token."""

    def reserve(self, heads: HeadShape, max_num_seqs: int, max_sampled: int, vocab_size: int, device: str) -> None:
        """Allocates the memory that attention and sampling need beside their arguments. It is called once, because
        captured graphs contain the addresses, and before the KV pool gets the rest of the memory. `max_sampled` is the
        number of rows with logits in one step, at most."""
        ...

    def load_rows(self, slots: SlotTensors, rows: RowTensors, block_size: int) -> None:
        """Writes new blocks into the slots' tables, then fills `rows` from the slots."""
        ...

    def append_sampled_tokens(self, slots: SlotTensors, rows: RowTensors) -> None:
        """Appends the sampled tokens to the slots' tokens."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """Adds and normalizes: residual += x; out = norm(residual)."""
        ...

    def norm(self, x: torch.Tensor, norm: NormWeights, eps: float, out: torch.Tensor) -> None:
        """Applies a norm of any kind. `out` may be `x`."""
        ...

    def add_scaled(self, x: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        """Adds in place: residual += factor * x."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None: ...

    def activate(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """Computes out = activation(x). If x has twice the columns of `out`: activation(gate) * up, where gates come
        first in x."""
        ...

    def finish_logits(self, logits: torch.Tensor, multiplier: float, softcap: float | None) -> None:
        """Multiplies the logits by the multiplier, then applies softcap * tanh(logits / softcap), both in place."""
        ...

    def decode_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, rows: RowTensors, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """Computes one decoding step of attention for one new token per row, and writes the result to `out`. Applies
        the norm of heads and the rotary embedding, stores K and V in `kv`, and attends. Row i of `qkv` belongs to row
        i of `rows`, whose lengths include the new token. Rows of length 0 are padding and are skipped."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, layer: AttentionLayer
    ) -> None:
        """Applies the norm of heads and the rotary embedding to queries, in place. Stores keys and values in their
        pages."""
        ...

    def chunk_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, num_heads: int,
        scoring: Scoring, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Computes the attention of the queries in `qkv`, whose keys are in their pages. `tiles` are as `chunk_tiles`
        makes them. In a fixed order a row has the same bits as from `decode_attention`."""
        ...

    def matmul(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Multiplies x by the weight [outputs, inputs]. Float8 weights have a scale for each output."""
        ...

    def invariant_linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Computes `matmul` without bias and scales, with bits that do not depend on the other rows. Rows after `out`
        in its buffer may be overwritten."""
        ...

    def invariant_gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Computes `invariant_linear` and then `silu_and_mul`: the weight has gates, then ups. `gate_up` may be
        overwritten."""
        ...

    def single_row_linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, *,
        norm: tuple[torch.Tensor, float] | None = None, adds: bool = False, gates: bool = False,
    ) -> None:  # fmt: skip
        """Computes `matmul` for one row without a bias. `norm` is applied to the row before. `gates` applies
        `silu_and_mul` to the product, and `adds` adds the result to `out`."""
        ...

    def sample(self, logits: torch.Tensor, rows: RowTensors, *, with_cuts: bool) -> None:
        """Samples a token for each row. `with_cuts` is false if no row uses top-k, top-p or min-p."""
        ...

    def apply_token_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Sets the logits of tokens whose bit is not set to minus infinity, in these rows (int64) of float32 logits.
        Bits are uint8, lowest first."""
        ...

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of the sum of exponentials of each row of float32 logits, in float64 [rows]. A row's
        bits do not depend on the other rows."""
        ...

    def accumulate_rows(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Adds to `total` (float64) each row, one after the other."""
        ...

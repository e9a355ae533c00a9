"""The memory layout of packed weights, which is the order in which the matrix kernels read them, scales included.

A matrix [out, in] becomes uint8 [out / 16, in / (32 * groups), record]. A record holds 16 outputs and one or more groups of
32 inputs:

    header      scales that all groups of the record share (super-blocks of 256 inputs only)
    groups      for each group its levels, then its own scales

A level is an unsigned number. Its bits lie in one or two planes of 1, 2, 4 or 8 bits. A plane of b bits is b vectors of
[16 outputs][4 bytes]. The bits from f * b on of vector h belong to the four inputs from 4 * (f * b + h) on. So a shift
and a mask make the operand of the dot instruction out of a vector. w = scale * (level - center), or + offset.

This module is independent of models and files.
"""

from dataclasses import dataclass
from typing import Literal

SCHEME = "int8-g32-v2"
"""Name of the quantization scheme, its layout included: int8 activations with a scale per row and 32 inputs; weights
likewise, or in the blocks of the checkpoint."""

GROUP = 32
TILE = 16
CHUNKS = GROUP // 4
"""Chunks of four inputs in a group."""
OUTPUT_UNIT = 2 * TILE
"""Kernels handle two tiles at a time, so the number of outputs is padded to a multiple of this."""

ScaleKind = Literal["float", "half", "offset", "zero", "exponent", "super", "halves", "halves_offset"]
"""The fields that 16 outputs have beside their levels; d and m are float16:

    float            per group: scale float32
    half             per group: d                             w = d * (level - center)
    offset           per group: d, m                          w = d * level + m
    zero             per group: d, z (uint8)                  w = d * level - d * z
    exponent         per group: e (uint8)                     w = 2^(e - 128) * (level - center)
    super            per record: d, m; per group: s, t (uint8)     w = d * s * level - m * t
    halves           per record: d; per 16 inputs: s (int8)        w = d * s * (level - center)
    halves_offset    per record: d, m; per 16 inputs: s + 16 * t   w = d * s * level - m * t
"""
_HEADER_HALVES = {"super": 2, "halves": 1, "halves_offset": 2}
_GROUP_BYTES = {"float": 64, "half": 32, "offset": 64, "zero": 48, "exponent": 16, "super": 32, "halves": 32,
                "halves_offset": 32}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    plane_bits: tuple[int, ...]
    """Bits of each plane; the plane with the lowest bits comes first."""
    center: int
    scales: ScaleKind
    groups: int = 1
    """Groups in a record."""
    has_codes: bool = False
    """Levels are codes of four bits for the values of `CODE_LEVELS`."""

    @property
    def header_bytes(self) -> int:
        return 2 * TILE * _HEADER_HALVES.get(self.scales, 0)

    @property
    def level_bytes(self) -> int:
        """Bytes of the levels of one group."""
        return 8 * CHUNKS * sum(self.plane_bits)

    @property
    def group_bytes(self) -> int:
        return self.level_bytes + _GROUP_BYTES[self.scales]

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.groups * self.group_bytes

    @property
    def has_half_groups(self) -> bool:
        """Whether 16 inputs have a scale of their own."""
        return self.scales in ("halves", "halves_offset")

    @property
    def has_offset(self) -> bool:
        return self.scales in ("offset", "zero", "super")


CODE_LEVELS = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the value of each 4-bit float (E2M1), plus 12."""

INT8 = WeightFormat("int8", (8,), 128, "float")
INT4_ZERO = WeightFormat("int4-zero", (4,), 0, "zero")
Q4_0 = WeightFormat("Q4_0", (4,), 8, "half")
Q4_1 = WeightFormat("Q4_1", (4,), 0, "offset")
Q5_0 = WeightFormat("Q5_0", (4, 1), 16, "half")
Q5_1 = WeightFormat("Q5_1", (4, 1), 0, "offset")
Q8_0 = WeightFormat("Q8_0", (8,), 128, "half")
Q2_K = WeightFormat("Q2_K", (2,), 0, "halves_offset", groups=8)
Q3_K = WeightFormat("Q3_K", (2, 1), 4, "halves", groups=8)
Q4_K = WeightFormat("Q4_K", (4,), 0, "super", groups=8)
Q5_K = WeightFormat("Q5_K", (4, 1), 0, "super", groups=8)
Q6_K = WeightFormat("Q6_K", (4, 2), 32, "halves", groups=8)
MXFP4 = WeightFormat("MXFP4", (4,), 12, "exponent", has_codes=True)

BLOCK_FORMATS = {
    kind.name: kind for kind in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4)
}  # fmt: skip
"""Formats of GGUF files, by their names there."""
FORMATS = {kind.name: kind for kind in (INT8, INT4_ZERO, *BLOCK_FORMATS.values())}
_BY_RECORD = {kind.record_bytes: kind for kind in FORMATS.values()}
assert len(_BY_RECORD) == len(FORMATS), "a record's size names its format"


def format_of_record(record_bytes: int) -> WeightFormat:
    """Returns the format of a packed array, from the size of its last dimension."""
    return _BY_RECORD[record_bytes]

"""Plans for products whose order of sums is fixed: tables of what was fastest on an H200. Independent of Triton."""

from dataclasses import dataclass, replace

_MANY = 512
"""From this number of rows on, all matrices have the same plan."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How the work is divided. No field changes a bit of the result: inputs are added up in their order."""

    rows: int
    outputs: int
    inputs: int = 64
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 0
    """Inputs whose weights are prefetched before the launch waits for its input. Only for few rows: with many,
    computing takes longer than waiting."""

    @classmethod
    def choose(cls, num_rows: int, num_outputs: int, *, gates: bool = False) -> "LinearPlan":
        plan = _measured(_GATES if gates else _PLAIN, num_rows, num_outputs)
        outputs = plan.outputs
        while gates and num_outputs % outputs:
            outputs //= 2
        return replace(plan, outputs=outputs)


_Table = dict[int, tuple[tuple[int, LinearPlan], ...]]
"""Maps a largest number of rows to plans, each with the smallest number of outputs that it is for, largest first."""

_AHEAD = 256
_FOR_MANY = LinearPlan(128, 128, num_warps=8)
_PLAIN: _Table = {
    16: (
        (6144, LinearPlan(16, 64, 128, num_stages=5, ahead=_AHEAD)),
        (0, LinearPlan(16, 32, 256, ahead=_AHEAD)),
    ),
    64: (
        (65_536, LinearPlan(64, 128, num_stages=5)),
        (4096, LinearPlan(64, 64, 128)),
        (0, LinearPlan(64, 16, 256)),
    ),
    128: (
        (65_536, LinearPlan(128, 128, 128, num_warps=8, num_stages=3)),
        (6144, LinearPlan(64, 128, num_stages=5)),
        (4096, LinearPlan(64, 64, 128)),
        (0, LinearPlan(64, 16, 256)),
    ),
    _MANY - 1: (
        (65_536, LinearPlan(256, 128, num_warps=8, num_stages=3)),
        (6144, LinearPlan(128, 128, num_warps=8)),
        (4096, LinearPlan(64, 128, num_stages=5)),
        (0, LinearPlan(64, 32, 256, num_stages=3)),
    ),
}
_GATES: _Table = {
    16: ((0, LinearPlan(16, 32, 128, num_stages=3, ahead=_AHEAD)),),
    64: ((8192, LinearPlan(64, 128)), (0, LinearPlan(64, 32, 128))),
    128: ((8192, LinearPlan(128, 128, num_warps=8, num_stages=3)), (0, LinearPlan(64, 64))),
    _MANY - 1: ((8192, LinearPlan(64, 128)), (0, LinearPlan(64, 64))),
}


def _measured(table: _Table, num_rows: int, num_outputs: int) -> LinearPlan:
    for most_rows, plans in table.items():
        if num_rows <= most_rows:
            return next(plan for least_outputs, plan in plans if num_outputs >= least_outputs)
    return _FOR_MANY


_LIBRARY_ROWS = 512
"""From this number of rows on, the library's products are faster than ours for all matrices."""
_LARGE_MATRIX = 8_000_000
_LARGE_MATRIX_ROWS = 17
"""From this number of rows on, they are faster for matrices of at least `_LARGE_MATRIX` weights."""
_FEW_GRANULE, _MANY_GRANULE = 32, 256


def library_rows(num_rows: int, num_outputs: int, num_inputs: int) -> int | None:
    """Returns the number of rows with which the library's product is called; None if ours is faster. Measured on an
    H200. The number is rounded up, so that there are few sizes: each is tried before it is used."""
    if num_rows >= _LIBRARY_ROWS:
        return -(-num_rows // _MANY_GRANULE) * _MANY_GRANULE
    if num_rows >= _LARGE_MATRIX_ROWS and num_outputs * num_inputs >= _LARGE_MATRIX:
        return -(-num_rows // _FEW_GRANULE) * _FEW_GRANULE
    return None

"""How fast this machine is at this moment: the line without which an absolute figure means nothing.

Machines that are shared, or that change their clock, move by a factor of two from one minute to the next.
"""

import statistics
import time
from collections.abc import Callable

import msgspec

from onward.optional_packages import require_torch

_READ_BYTES = 256 << 20
_IN, _OUT, _NUM_WEIGHTS = 576, 3072, 30
_ROWS = (1, 32)
_PASSES = 5


class Calibration(msgspec.Struct, frozen=True):
    read_gb_per_s: float
    int_mm_ms: dict[str, float]
    """Time of one 576 to 3072 product, by the number of rows."""

    def line(self) -> str:
        products = ", ".join(f"{ms:.3f} ms at {rows} rows" for rows, ms in self.int_mm_ms.items())
        return f"calibration: {self.read_gb_per_s:.1f} GB/s read; 576→3072 int8 product {products}"


def calibrate() -> Calibration:
    """Takes about half a second, and the memory of the arrays only as long."""
    require_torch("the calibration line")
    return Calibration(_read_gb_per_s(), {str(rows): _int_mm_ms(rows) for rows in _ROWS})


def _read_gb_per_s() -> float:
    import torch

    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / _median_s(lambda: numbers.sum()) / 1e9


def _int_mm_ms(rows: int) -> float:
    """Many weights in turn, as in a model: a single one would stay in the cache."""
    import torch

    x = torch.randint(-127, 128, (rows, _IN), dtype=torch.int8)
    weights = [torch.randint(-64, 64, (_OUT, _IN), dtype=torch.int8) for _ in range(_NUM_WEIGHTS)]

    def multiply_all() -> None:
        for weight in weights:
            torch._int_mm(x, weight.t())  # pyright: ignore[reportPrivateImportUsage]

    return _median_s(multiply_all) / _NUM_WEIGHTS * 1000


def _median_s(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    for _ in range(_PASSES):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)

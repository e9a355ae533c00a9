"""Compiles Triton kernels for an H100 or H200 without a device, and reads the layouts of the compiled code.

`compiled_kernels` collects every kernel that is launched inside it instead of launching it. The code that is read is TTGIR:
Triton's operations with the layout of each tensor over warps and threads, before they become instructions.
"""

import math
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from onward.kernels.triton import kernel_launch

_TARGET = GPUTarget("cuda", 90, 32)
_BFLOAT16_INNER = 16
"""Inputs that one bfloat16 matrix instruction adds up. Triton does not name them for instructions of version 2."""
_EXACT_OPERATIONS = {
    "arith.addi", "arith.andi", "arith.ori", "arith.xori", "arith.cmpi", "arith.cmpf", "arith.select",
    "arith.maxsi", "arith.maxui", "arith.minsi", "arith.minui",
    "arith.maxnumf", "arith.maximumf", "arith.minnumf", "arith.minimumf",
}  # fmt: skip
"""The result of a reduction that consists of these does not depend on its order."""

_REDUCTION = re.compile(
    r'"tt\.(?P<kind>reduce|scan)"\([^)]*\) <\{axis = (?P<axis>\d+) : i32[^}]*\}> \(\{\n'
    r"(?P<body>.*?)\n\s*\}\) : \((?P<operands>.*?)\) ->",
    re.DOTALL,
)
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
_OPERATION = re.compile(r"\b(?:arith|math|tt)\.\w+")
_PRODUCT = re.compile(r"= (?P<name>tt\.dot|ttng\.warp_group_dot) .*-> tensor<\d+x\d+xf32, (?P<layout>#\w+)>")
_MMA_LAYOUT = re.compile(r"^(?P<name>#\w+) = #ttg\.nvidia_mma<\{(?P<fields>.*)\}>$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One sum, maximum or running sum along an axis of a tensor."""

    kind: str
    size: int
    """Elements along the axis."""
    operations: frozenset[str]

    @property
    def depends_on_order(self) -> bool:
        """Whether the bits of the result may change with the order: two operands have only one."""
        return self.size > 2 and not self.operations <= _EXACT_OPERATIONS


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product."""

    version: int
    warps: tuple[int, ...]
    """Along each axis of the result."""
    inner: int
    """Inputs that one instruction adds up."""
    operand_widths: tuple[int, ...]
    """Neighbouring inputs that a thread holds of each operand in registers. Other values than the instruction's own put
    inputs into another order."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    name: str
    options: dict[str, Any]
    ttgir: str
    metadata: Any

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.options.items())})"

    def reductions(self) -> list[Reduction]:
        found = [_reduction(match) for match in _REDUCTION.finditer(self.ttgir)]
        assert len(found) == len(re.findall(r"tt\.(?:reduce|scan)\"", self.ttgir)), f"unknown text in {self}"
        return found

    def products(self) -> list[Product]:
        layouts = {match["name"]: match["fields"] for match in _MMA_LAYOUT.finditer(self.ttgir)}
        found = [_product(match, layouts) for match in _PRODUCT.finditer(self.ttgir)]
        assert len(found) == len(re.findall(r"= tt\w*\.\w*dot\w* ", self.ttgir)) - self.ttgir.count("dot_wait"), self
        return found


def _reduction(match: re.Match[str]) -> Reduction:
    shape = _SHAPE.match(match["operands"])
    assert shape is not None, match["operands"]
    sizes = [int(size) for size in shape[1].rstrip("x").split("x")]
    operations = set(_OPERATION.findall(match["body"])) - {"tt.reduce", "tt.scan"}
    return Reduction(match["kind"], sizes[int(match["axis"])], frozenset(operations))


def _product(match: re.Match[str], layouts: dict[str, str]) -> Product:
    assert match["layout"] in layouts, f"not a product of matrix instructions: {match[0]}"
    fields = layouts[match["layout"]]
    shape = _numbers(fields, "instrShape")
    widths = tuple(int(width) for width in re.findall(r"kWidth = (\d+)", match[0]))
    version = re.search(r"versionMajor = (\d+)", fields)
    assert version is not None, fields
    inner = shape[2] if len(shape) > 2 else _BFLOAT16_INNER
    return Product(int(version[1]), _numbers(fields, "warpsPerCTA"), inner, widths)


def _numbers(fields: str, name: str) -> tuple[int, ...]:
    match = re.search(rf"{name} = \[([\d, ]+)\]", fields)
    assert match is not None, f"no {name} in {fields}"
    return tuple(int(number) for number in match[1].split(","))


def num_warps_of(product: Product) -> int:
    return math.prod(product.warps)


class _StandInDriver:
    """What Triton asks its driver for when it compiles. The device is a new object: Triton keeps compiled kernels for each
    device, and these must not be found later."""

    def __init__(self) -> None:
        self._device = object()

    def get_current_device(self) -> object:
        return self._device

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _stop_after_layouts(_backend: object, stages: dict[str, Any], *_: object) -> None:
    """Leaves out the stages after TTGIR, which take more than half of the time. Their metadata are not read."""

    def finish(_module: object, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="", shared=0)
        return b""

    del stages["llir"], stages["ptx"]
    stages["cubin"] = finish


class _Compiler:
    """Stands where `launching` notes launches: each variant is compiled once, and none is launched."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self.kernels: list[CompiledKernel] = []

    def takes(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        key = kernel_launch._variant(kernel, args, options)
        if key not in self._seen:
            self._seen.add(key)
            compiled = kernel.warmup(*args, grid=(1,), **options)
            self.kernels.append(CompiledKernel(kernel.__name__, options, compiled.asm["ttgir"], compiled.metadata))
        return False


@contextmanager
def compiled_kernels(cache_dir: Path) -> Iterator[list[CompiledKernel]]:
    """The kernels that are launched inside, compiled for sm_90, each variant once. Puts Triton's settings back."""
    driver = triton.runtime.driver
    driver_before, compiler = driver._active, _Compiler()
    with knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = str(cache_dir)
        knobs.runtime.add_stages_inspection_hook = _stop_after_layouts
        driver.set_active(_StandInDriver())
        token = kernel_launch._share.set(compiler)
        try:
            yield compiler.kernels
        finally:
            kernel_launch._share.reset(token)
            driver._active = driver_before

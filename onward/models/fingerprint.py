"""The numerics fingerprint: equal on two instances if and only if they compute the same bits.

KV may be exchanged, and a stream resumed exactly, only between equal ones. Nothing heavy is imported to compute it.
"""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import msgspec

KERNEL_VERSION = 3
"""Raised whenever a change to layers or kernels can change a bit of a result."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_INSTRUCTION_SETS = ("avx", "fma", "amx", "sse4", "asimd", "sve", "i8mm", "bf16")


def numerics_fingerprint(
    *,
    weights_sha256: str,
    scheme: str,
    dtype: str,
    device: str = "cpu",
    deterministic: bool = False,
    tensor_parallel: int = 1,
) -> str:
    facts = {
        "weights": weights_sha256,
        "scheme": scheme,
        "dtype": dtype,
        "kernels": KERNEL_VERSION,
        "libraries": {name: _version(name) for name in _libraries(device, scheme)},
        "instructions": instruction_set() if device == "cpu" else gpu_model(),
        "tensor_parallel": tensor_parallel,
    }
    if deterministic:
        facts["deterministic"] = True
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def _libraries(device: str, scheme: str) -> tuple[str, ...]:
    """Those that compute. int8 uses no torch, so an instance that has it and one that has not are equal."""
    if device == "cuda":
        return ("torch", "triton")
    return ("torch", "numba", "numpy") if scheme == "none" else ("numba", "numpy")


def has_gpu() -> bool:
    """Whether a driver says so; without importing anything."""
    return _GPUS.is_dir() and any(_GPUS.iterdir())


def gpu_model() -> str:
    """As its driver names it; devices of one name compute alike."""
    for path in sorted(_GPUS.glob("*/information")) if _GPUS.is_dir() else ():
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "cuda"


def instruction_set() -> str:
    """The machine and the vector extensions that libraries choose their kernels by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    flags = line.partition(":")[2].split()
    return " ".join([platform.machine(), *sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))])


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None

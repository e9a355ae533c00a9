"""The numerics fingerprint: equal on two instances if and only if they compute the same bits.

KV may be exchanged, and a stream resumed exactly, only between instances with equal fingerprints. Computing it imports
no heavy library.
"""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import msgspec

KERNEL_VERSION = 3
"""Raised whenever a change to layers or kernels can change a bit of a result."""
KV_LAYOUT_VERSION = 1
"""Raised whenever the layout of keys and values in KV memory changes on any device, so that a new server does not use
the memory of an old one."""

CONVERSION_VERSION = 4
"""Raised whenever the same checkpoint is converted to other weights, or to another format of the folder."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_INSTRUCTION_SETS = ("avx", "fma", "amx", "sse4", "asimd", "sve", "i8mm", "bf16")


def numerics_fingerprint(
    *,
    weights_sha256: str,
    scheme: str,
    dtype: str,
    device: str = "cpu",
    deterministic: bool = False,
    is_converted: bool = False,
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
    if is_converted:
        # The hash of a checkpoint does not say how its numbers are read.
        facts["conversion"] = CONVERSION_VERSION
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def with_ranks(fingerprint: str, num_ranks: int) -> str:
    """Returns the fingerprint of a float model that so many ranks compute together: they add up each product by inputs from
    as many parts. int8 models have the same bits with any number of ranks."""
    return hashlib.sha256(f"{fingerprint} {num_ranks} ranks".encode()).hexdigest()[:16]


def _libraries(device: str, scheme: str) -> tuple[str, ...]:
    """Returns the libraries that compute. int8 does not use torch, so instances with and without it have equal
    fingerprints."""
    if device == "cuda":
        return ("torch", "triton")
    return ("torch", "numba", "numpy") if scheme == "none" else ("numba", "numpy")


def has_gpu() -> bool:
    """Returns whether the NVIDIA driver reports a GPU. Imports nothing for it."""
    return _GPUS.is_dir() and any(_GPUS.iterdir())


def gpu_model() -> str:
    """Returns the name that the driver gives the GPU. Devices of the same name compute the same bits."""
    for path in sorted(_GPUS.glob("*/information")) if _GPUS.is_dir() else ():
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "cuda"


def instruction_set() -> str:
    """Returns the machine type and the vector extensions, by which libraries choose their kernels."""
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

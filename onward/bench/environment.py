"""Facts about the machine that a figure was measured on. A figure without them says little."""

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("onward", "torch", "numba", "numpy", "aiohttp")


def describe_machine() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_field("model name"),
        "cpu_cores": os.cpu_count(),
        "cpu_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_flags": sorted({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"} & _cpu_flags()),
        "load_average": os.getloadavg()[0],
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def _cpu_flags() -> set[str]:
    return set((_cpu_field("flags") or "").split())


def _cpu_field(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

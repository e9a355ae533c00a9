"""Finds out whether this machine has a usable CUDA device, before anything is fetched for it. torch is not imported.

The driver is queried in a separate process, because a process that has opened it cannot be forked any more. torch is
not used, because importing it takes seconds.
"""

import subprocess
import sys
from importlib import metadata

from onward.errors import StartupError

_TIMEOUT_S = 30.0
_ASK_DRIVER = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit()
count = ctypes.c_int(0)
status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print("devices", count.value if not status else 0, "status", status)
"""
"""Honours CUDA_VISIBLE_DEVICES, as torch does."""


def require_cuda_device() -> None:
    """Raises `StartupError` if `--device cuda` certainly cannot work here. The worker detects all other problems."""
    if (reason := cuda_problem()) is not None:
        raise StartupError(f"--device cuda: {reason}; use --device cpu")


def cuda_problem() -> str | None:
    """Returns why `--device cuda` certainly cannot work here; None if no problem can be seen without torch."""
    return _torch_problem() or _driver_problem()


def _torch_problem() -> str | None:
    """Returns why the installed torch cannot use CUDA. Its version shows what it is built for."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed"
    return f"torch {version} is built without CUDA" if version.endswith("+cpu") else None


def _driver_problem() -> str | None:
    command = [sys.executable, "-I", "-S", "-c", _ASK_DRIVER]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match asked.stdout.split():
        case ["devices", "0", "status", status]:
            return f"the CUDA driver finds no device here (status {status})"
        case [] if asked.returncode == 0:
            return "there is no CUDA driver here"
    return None

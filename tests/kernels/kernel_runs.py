"""Runs a kernel on arrays given by name."""

from typing import Any

import numpy as np

from onward.kernels.cpu.jit import Kernel
from onward.kernels.cpu.phases import WORDS_PER_PHASE
from onward.kernels.cpu.threads import ThreadPool


def run(kernel: Kernel, *, num_threads: int = 1, num_phases: int = 1, **fields: Any) -> None:
    context = np.zeros((), kernel.context)
    if "work" in kernel.context.names:  # type: ignore[operator]
        fields["work"] = np.zeros((num_phases, WORDS_PER_PHASE), np.int64)
    for name, value in fields.items():
        context[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    ThreadPool(num_threads).run(kernel, context)

"""Reports numba's progress when kernels must be compiled. The first start on a machine takes half a minute for that;
later ones load the kernels."""

import contextlib
from collections.abc import Callable, Iterator

from numba.core import event

MESSAGE = "compiling kernels for this CPU, kept for later starts"

_NUM_FUNCTIONS = 85
"""Functions of an int8 model, as numba counts them. Only the speed of the progress bar depends on it."""


class _CompileListener(event.Listener):
    def __init__(self, progress: Callable[[str, float | None], None]) -> None:
        self._progress, self._num_done = progress, 0

    def on_start(self, event: event.Event) -> None:
        self._report()

    def on_end(self, event: event.Event) -> None:
        self._num_done += 1
        self._report()

    def _report(self) -> None:
        self._progress(MESSAGE, min(0.99, self._num_done / _NUM_FUNCTIONS))


@contextlib.contextmanager
def report_compile_progress(progress: Callable[[str, float | None], None]) -> Iterator[None]:
    """Reports progress inside the context. Reports nothing if every kernel is in the cache."""
    listener = _CompileListener(progress)
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)

"""Shows the progress of downloads, conversions, loading and warm-up: a spinner in a terminal, plain lines in a file."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column


class ProgressDisplay:
    """Callable as `progress(message, fraction)`. A fraction of None means that the duration is unknown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._bar = Progress(
            SpinnerColumn(),
            # The bar is always one line: log lines replace the line of the bar, and would be lost in a higher one.
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __call__(self, message: str, fraction: float | None) -> None:
        if self._console.is_terminal:
            if message != self._last:  # starts a new bar: a full one would stand still, and its clock too
                self._bar.reset(self._task)
            total = None if fraction is None else 1.0
            self._bar.update(self._task, description=message, total=total, completed=fraction or 0.0)
        elif message != self._last:
            self._console.print(message, highlight=False, soft_wrap=True)
        self._last = message

    def show_message(self, message: str) -> None:
        self(message, None)

    def stop(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

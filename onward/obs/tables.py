"""Prints tables whole: rich would cut or drop columns that do not fit into the terminal, and into 80 columns in a pipe.

A row stays one line. A terminal that is narrower wraps it, which loses no figure.
"""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH = 10_000


def print_table(console: Console, table: Table) -> None:
    wide = console.options.update(max_width=MAX_WIDTH)
    needed = Measurement.get(console, wide, table).maximum
    # Output is cut at the width of the console.
    console.width = max(console.width, needed)
    console.print(table)

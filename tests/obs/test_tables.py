"""Tables are printed whole, however narrow the terminal is."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from onward.obs.tables import print_table


@pytest.mark.parametrize("soft_wrap", [False, True])
@pytest.mark.parametrize("width", [20, 80, 400])
def test_no_figure_is_cut_or_dropped_and_a_row_is_a_line(width: int, soft_wrap: bool) -> None:
    out = io.StringIO()
    table = Table()
    for index in range(12):
        table.add_column(f"column {index}", justify="right", no_wrap=index % 2 == 0)
    figures = [f"{1234567 + index:,}" for index in range(12)]
    table.add_row(*figures)
    print_table(Console(file=out, width=width, soft_wrap=soft_wrap), table)
    [row] = [line for line in out.getvalue().splitlines() if figures[0] in line]
    assert all(figure in row for figure in figures)

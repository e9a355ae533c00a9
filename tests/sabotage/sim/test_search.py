"""The simulator can fail: deliberate bugs are noticed within few seeds."""

import pytest

from tests.sabotage.sim.search import Row, search
from tests.sabotage.sim.table import QUICK, TABLE


def test_there_are_enough_bugs_and_each_has_a_name_of_its_own() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names)) >= 25
    assert set(names) >= QUICK


@pytest.mark.parametrize("row", [row for row in TABLE if row.name in QUICK], ids=lambda row: row.name)
def test_a_bug_that_shows_soon_is_noticed(row: Row) -> None:
    assert search(row) is not None


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in TABLE if row.name not in QUICK], ids=lambda row: row.name)
def test_every_bug_is_noticed_within_its_number_of_seeds(row: Row) -> None:
    assert search(row) is not None

"""The deliberate bugs are put where the code still is. `make sabotage` shows, more slowly, that each is noticed."""

import pytest

from tests.sabotage import TABLE
from tests.sabotage_kinds import Sabotage


@pytest.mark.parametrize("sabotage", TABLE, ids=lambda one: one.name)
def test_a_deliberate_bug_finds_its_place_and_can_be_taken_back(sabotage: Sabotage) -> None:
    with sabotage.broken():
        pass

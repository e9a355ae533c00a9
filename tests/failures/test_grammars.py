"""F42: a request under a grammar that another instance resumes."""

import json

import pytest

from onward.sim.oracle import STRUCTURES
from tests.worker import spoken
from tests.worker.spoken import AtOnce, resumed, sampling, text_of


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("seed", range(3))
def test_f42_an_output_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(name: str, seed: int) -> None:
    """Another engine began the grammar anew: JSON within JSON, with status 200."""
    structure = STRUCTURES[name]
    whole = resumed(spoken.driver(AtOnce()), sampling(structure.grammar, seed=seed))
    driver = spoken.driver(AtOnce())
    for cut in range(len(whole[0])):
        assert resumed(driver, sampling(structure.grammar, seed=seed), whole[0][:cut]) == whole
    if name == "object" and whole[1]:
        assert isinstance(json.loads(text_of(whole[0])), dict)

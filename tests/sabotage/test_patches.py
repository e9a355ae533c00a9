"""The deliberate bugs themselves: each has a place in the code of today, and can be taken out of it again."""

import pytest

from onward.engine.scheduling.block_pool import BlockPool
from tests.sabotage import TABLE
from tests.sabotage_child import sabotaged
from tests.sabotage_kinds import Patches, Sabotage


@pytest.mark.parametrize("sabotage", TABLE, ids=lambda sabotage: sabotage.name)
def test_a_sabotage_finds_its_place_and_leaves_nothing_behind(sabotage: Sabotage) -> None:
    patches = Patches()
    sabotage.apply(patches)
    bugs = [(owner, name, vars(owner)[name]) for owner, name in patches.places]
    assert bugs
    patches.undo()
    assert not [name for owner, name, bug in bugs if vars(owner).get(name) is bug]


def test_a_rule_is_broken_inside_and_whole_again_afterwards() -> None:
    [sabotage] = [one for one in TABLE if one.name == "fences-unseen"]
    rule = vars(BlockPool)["num_fenced"]
    with pytest.raises(ZeroDivisionError), sabotage.broken():
        assert vars(BlockPool)["num_fenced"] is not rule
        raise ZeroDivisionError
    assert vars(BlockPool)["num_fenced"] is rule


def test_a_bug_whose_place_is_gone_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no_such_rule"):
        Patches().put(BlockPool, "no_such_rule", None)


def test_only_processes_of_ours_are_broken_too() -> None:
    ours = ["python", "-W", "error", "-m", "onward.api.main", "--control-fd", "3"]
    broken = [
        "python",
        "-W",
        "error",
        "-m",
        "tests.sabotage_child",
        "tail-only",
        "onward.api.main",
        "--control-fd",
        "3",
    ]
    assert sabotaged(ours, "tail-only") == broken
    for others in (["git", "log"], ["python", "-m", "pip"], ["python", "-m"]):
        assert sabotaged(others, "tail-only") == others

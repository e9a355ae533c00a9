"""The deliberate bugs themselves: each has a place in the code of today, and can be taken out of it again."""

from pathlib import Path

import pytest

from onward.engine.scheduling.block_pool import BlockPool
from tests.sabotage.child import sabotaged
from tests.sabotage.patches import FAULTS_FILE, Patches, Sabotage
from tests.sabotage.table import TABLE


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


def test_a_bug_that_fails_by_itself_is_noted_and_one_that_makes_shipping_code_fail_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted = tmp_path / "faults"
    monkeypatch.setenv(FAULTS_FILE, str(noted))
    for bug, fault in (
        (lambda original, self: self.renamed_since, AttributeError),
        (lambda original: None, TypeError),
        (lambda original, self: original(self, 1), TypeError),
    ):
        patches = Patches()
        patches.around(BlockPool, "count_by_state", bug)
        with pytest.raises(fault):
            BlockPool(4, 16).count_by_state()
        patches.undo()
        assert fault.__name__ in noted.read_text()
        noted.unlink()
    patches = Patches()
    patches.around(BlockPool, "acquire_cached", lambda original, self, hashes: original(self, None))
    with pytest.raises(TypeError):
        BlockPool(4, 16).acquire_cached([])
    patches.undo()
    assert not noted.exists()


def test_only_processes_of_ours_are_broken_too() -> None:
    ours = ["python", "-W", "error", "-m", "onward.api.main", "--control-fd", "3"]
    broken = [
        "python",
        "-W",
        "error",
        "-m",
        "tests.sabotage.child",
        "tail-only",
        "onward.api.main",
        "--control-fd",
        "3",
    ]
    assert sabotaged(ours, "tail-only") == broken
    for others in (["git", "log"], ["python", "-m", "pip"], ["python", "-m"]):
        assert sabotaged(others, "tail-only") == others

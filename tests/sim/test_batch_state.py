"""What a batch keeps in a file."""

from pathlib import Path

import pytest

from onward.errors import InvalidRequest
from onward.sim import batch_state
from onward.sim.batch import RunTotals
from onward.sim.batch_state import BatchState, CompletedRange
from onward.sim.scenario_generator import FaultSelection


def done(start: int, stop: int, code: str = "a", shape: str = "pd") -> CompletedRange:
    return CompletedRange(shape, start, stop, code, RunTotals(num_runs=stop - start, tokens={5: stop - start}))  # type: ignore[arg-type]


def test_neighbours_become_one_range_with_the_sums_of_both() -> None:
    state = BatchState()
    for one in (done(0, 5), done(10, 12), done(5, 10)):
        state.add(one)
    assert [(one.start, one.stop) for one in state.done] == [(0, 12)]
    assert state.tallies()["pd"].num_runs == 12
    assert state.tallies()["pd"].tokens == {5: 12}


def test_ranges_of_other_code_and_other_shapes_stay_apart() -> None:
    state = BatchState()
    for one in (done(0, 5), done(5, 7, code="b"), done(5, 6, shape="engine")):
        state.add(one)
    assert len(state.done) == 3
    assert state.num_runs_by_code() == {"a": 6, "b": 2}
    assert [one.start for one in state.of_other_code("a")] == [5]
    assert state.ranges()["pd"] == [range(5), range(5, 7)]


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    choice = FaultSelection(frozenset({"lose", "abort"}), {"lose": 2.0})
    state = BatchState(choice, [done(0, 5)], 3.5)
    batch_state.save(tmp_path / "new" / "state", state)
    assert batch_state.load(tmp_path / "new" / "state", choice) == state
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["state"]


def test_no_file_is_an_empty_state(tmp_path: Path) -> None:
    assert batch_state.load(tmp_path / "none", FaultSelection()).done == []


def test_a_state_of_other_faults_is_not_mixed_with_these(tmp_path: Path) -> None:
    batch_state.save(tmp_path / "state", BatchState(FaultSelection(frozenset({"lose"}))))
    with pytest.raises(InvalidRequest, match="other --only"):
        batch_state.load(tmp_path / "state", FaultSelection())


@pytest.mark.parametrize("content", [b"", b"{", b'{"done": 3}', b'{"schema": 99}'])
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(InvalidRequest, match="state"):
        batch_state.load(tmp_path / "state", FaultSelection())


def test_the_code_is_known_by_its_contents() -> None:
    assert batch_state.code_digest() == batch_state.code_digest()
    assert len(batch_state.code_digest()) == 16


def test_prose_does_not_change_the_digest_of_a_module_and_code_does() -> None:
    before = (
        b'"""Says."""\nclass A:\n    """Is."""\n    x: int = 1\n    """Counts."""\n    def f(self): return 1  # why\n'
    )
    reworded = (
        b'class A:\n\n    """Is another."""\n    x: int = 1\n    def f(self):\n        """Is."""\n        return 1\n'
    )
    assert batch_state.syntax_of(before) == batch_state.syntax_of(reworded)
    assert batch_state.syntax_of(before) != batch_state.syntax_of(before.replace(b"return 1", b"return 2"))
    assert batch_state.syntax_of(before) != batch_state.syntax_of(before.replace(b"x: int = 1", b'x: str = "1"'))

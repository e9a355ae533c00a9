"""What a batch keeps from one call to the next: which ranges of seeds are done, by which code, and their sums."""

import hashlib
import sys
from pathlib import Path

import msgspec

from onward.errors import InvalidRequest
from onward.sim.batch import RunTotals, sum_totals
from onward.sim.scenario import SHAPES, Shape
from onward.sim.scenario_generator import FaultSelection

SCHEMA = 1
_MODULES_NO_RUN_DEPENDS_ON = (
    "onward.cli",
    "onward.sim.batch",
    "onward.sim.shrink",
    "onward.sim.report",
    "onward.sim.batch_state",
)
"""Modules that no run depends on."""


class CompletedRange(msgspec.Struct, frozen=True, rename={"totals": "tally"}):
    """A range of seeds, and what came of it."""

    shape: Shape
    start: int
    stop: int
    code: str
    totals: RunTotals


class BatchState(msgspec.Struct, rename={"selection": "choice"}):
    selection: FaultSelection = FaultSelection()
    done: list[CompletedRange] = []
    wall_s: float = 0.0
    """That calls have spent on it, together."""
    schema: int = SCHEMA

    def add(self, done: CompletedRange) -> None:
        """Neighbours of the same code become one."""
        for index, completed in enumerate(self.done):
            is_alike = (completed.shape, completed.code) == (done.shape, done.code)
            if is_alike and (completed.stop == done.start or done.stop == completed.start):
                del self.done[index]
                start, stop = min(completed.start, done.start), max(completed.stop, done.stop)
                return self.add(
                    CompletedRange(
                        completed.shape, start, stop, completed.code, sum_totals([completed.totals, done.totals])
                    )
                )
        self.done.append(done)
        return None

    def ranges(self) -> dict[Shape, list[range]]:
        return {
            shape: [range(completed.start, completed.stop) for completed in self.done if completed.shape == shape]
            for shape in SHAPES
        }

    def num_runs_by_code(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for completed in self.done:
            counts[completed.code] = counts.get(completed.code, 0) + completed.totals.num_runs
        return counts

    def of_other_code(self, code: str) -> list[CompletedRange]:
        return [completed for completed in self.done if completed.code != code]

    def tallies(self) -> dict[Shape, RunTotals]:
        """Of all that is done, by shape."""
        shapes: list[Shape] = [shape for shape in SHAPES if any(completed.shape == shape for completed in self.done)]
        return {
            shape: sum_totals([completed.totals for completed in self.done if completed.shape == shape])
            for shape in shapes
        }


def code_digest() -> str:
    """Of all of our modules that a run has loaded."""
    digest = hashlib.blake2b(digest_size=8)
    for name, module in sorted(sys.modules.items()):
        if (
            name.startswith("onward.")
            and not name.startswith(_MODULES_NO_RUN_DEPENDS_ON)
            and module.__file__ is not None
        ):
            digest.update(name.encode() + Path(module.__file__).read_bytes())
    return digest.hexdigest()


def load(path: Path, choice: FaultSelection) -> BatchState:
    """Empty where there is no file yet."""
    if not path.exists():
        return BatchState(choice)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=BatchState)
    except (OSError, msgspec.MsgspecError) as fault:
        raise InvalidRequest(f"--state {path} cannot be read: {fault}", param="state") from None
    if state.schema != SCHEMA:
        raise InvalidRequest(f"--state {path} is of another version: remove it", param="state")
    if state.selection != choice:
        raise InvalidRequest(f"--state {path} was begun with other --only or --fault", param="state")
    return state


def save(path: Path, state: BatchState) -> None:
    """All of it or nothing, whenever the power goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_bytes(msgspec.json.encode(state))
    unfinished.replace(path)

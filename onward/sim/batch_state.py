"""The state that a batch keeps between calls: completed ranges of seeds, with their code digests and sums."""

import ast
import functools
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
    """A completed range of seeds, with the digest of the code and the totals."""

    shape: Shape
    start: int
    stop: int
    code: str
    totals: RunTotals


class BatchState(msgspec.Struct, rename={"selection": "choice"}):
    selection: FaultSelection = FaultSelection()
    done: list[CompletedRange] = []
    wall_s: float = 0.0
    """Seconds that all calls together have spent on the batch."""
    schema: int = SCHEMA

    def add(self, done: CompletedRange) -> None:
        """Adds a completed range. Merges it with adjacent ranges of the same shape and code."""
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
        """Returns the totals of all completed ranges by shape."""
        shapes: list[Shape] = [shape for shape in SHAPES if any(completed.shape == shape for completed in self.done)]
        return {
            shape: sum_totals([completed.totals for completed in self.done if completed.shape == shape])
            for shape in shapes
        }


def code_digest() -> str:
    """Returns a digest of every module of the package that a run has loaded. Docstrings and comments do not count, so
    runs made before a change of prose stay valid."""
    digest = hashlib.blake2b(digest_size=8)
    for name, module in sorted(sys.modules.items()):
        if (
            name.startswith("onward.")
            and not name.startswith(_MODULES_NO_RUN_DEPENDS_ON)
            and module.__file__ is not None
        ):
            digest.update(name.encode() + syntax_of(Path(module.__file__).read_bytes()).encode())
    return digest.hexdigest()


@functools.cache  # most of a second for all modules
def syntax_of(source: bytes) -> str:
    """Returns the syntax tree of a module without docstrings, positions and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_docstring(statement)]
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    """Returns whether the statement is a bare string: a docstring, or the description of the field above it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def load(path: Path, choice: FaultSelection) -> BatchState:
    """Returns the state in the file, or an empty state if there is no file yet."""
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
    """Writes a new file and renames it, so that an interrupted call leaves the old state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_bytes(msgspec.json.encode(state))
    unfinished.replace(path)

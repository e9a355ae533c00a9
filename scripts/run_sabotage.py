"""Breaks each rule of `tests/sabotage/table.py` in turn and shows that its tests notice. Fails if one stays green.

Each rule is broken in a forked child, so that pytest and the package are imported once for all of them.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.sabotage.patches import Sabotage  # noqa: E402
from tests.sabotage.table import TABLE  # noqa: E402

TIMEOUT_S = 120
"""For the tests of one sabotage."""
ALL_TIMEOUT_S = 900
PYTEST_FLAGS = ["-q", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
MAX_AT_ONCE = 2
POLL_S = 1.0
SHOWN_LINES = 25


@dataclass(frozen=True, slots=True)
class RunningSabotage:
    sabotage: Sabotage
    process: ForkProcess
    output_path: Path
    started_s: float

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.started_s > TIMEOUT_S


def run_healthy(tests: Sequence[str]) -> tuple[int, str]:
    """The tests without any sabotage, in a process of their own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *PYTEST_FLAGS, *tests],
            cwd=ROOT, capture_output=True, text=True, timeout=ALL_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"not done after {ALL_TIMEOUT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def run_in_child(sabotage: Sabotage, output_path: Path) -> None:
    """The child's part: its exit status says whether every test has noticed the bug."""
    os.setsid()  # what the tests start can be ended with it
    with output_path.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # What is imported before the fork has no rewritten asserts: they fail all the same, with a shorter message.
    flags = [*PYTEST_FLAGS, "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*flags, "-p", "tests.sabotage.plugin", "--sabotage", sabotage.name, *sabotage.tests])
    atexit._run_exitfuncs()  # a forked child does not run them by itself; pytest removes its folders there
    sys.exit(int(code))


def start(sabotage: Sabotage, folder: Path) -> RunningSabotage:
    output_path = folder / sabotage.name
    process = multiprocessing.get_context("fork").Process(target=run_in_child, args=(sabotage, output_path))
    process.start()
    return RunningSabotage(sabotage, process, output_path, time.monotonic())


def finish(running: RunningSabotage) -> bool:
    """Whether every test that should have noticed has."""
    if running.process.is_alive():
        assert running.process.pid is not None, "a started process has an id"
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.join()
    sabotage, is_noticed = running.sabotage, running.process.exitcode == 0
    verdict = "red" if is_noticed else "GREEN"
    duration_s = time.monotonic() - running.started_s
    print(f"{verdict:6} {sabotage.name:28} {duration_s:5.1f} s  {sabotage.breaks}", flush=True)
    if not is_noticed:
        lines = running.output_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join(f"       {line}" for line in lines), flush=True)
    return is_noticed


def break_all(sabotages: Sequence[Sabotage]) -> list[bool]:
    waiting, running, verdicts = deque(sabotages), [], []
    folder = tempfile.mkdtemp()  # a TemporaryDirectory would be removed by the first child that exits
    try:
        while waiting or running:
            while waiting and len(running) < MAX_AT_ONCE:
                running.append(start(waiting.popleft(), Path(folder)))
            multiprocessing.connection.wait([one.process.sentinel for one in running], POLL_S)
            ended = [one for one in running if one.is_overdue or not one.process.is_alive()]
            verdicts += [finish(one) for one in ended]
            running = [one for one in running if one not in ended]
    finally:
        shutil.rmtree(folder)
    return verdicts


def main() -> int:
    names = sys.argv[1:]
    unknown = {*names} - {sabotage.name for sabotage in TABLE}
    if unknown:
        sys.exit(f"no sabotage is named {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    chosen = [sabotage for sabotage in TABLE if not names or sabotage.name in names]
    code, output = run_healthy(sorted({test for sabotage in chosen for test in sabotage.tests}))
    if code != 0:
        print(f"The tests fail without any sabotage:\n{output}")
        return 1
    verdicts = break_all(chosen)
    print(f"{sum(verdicts)} of {len(verdicts)} sabotages are noticed")
    return 0 if all(verdicts) and verdicts else 1


if __name__ == "__main__":
    sys.exit(main())

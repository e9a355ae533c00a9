"""Breaks each rule of `tests/sabotage/table.py` in turn and shows that its tests notice. Fails if one stays green."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.sabotage.patches import Sabotage  # noqa: E402
from tests.sabotage.table import TABLE  # noqa: E402

TIMEOUT_S = 120
"""For the tests of one sabotage."""
ALL_TIMEOUT_S = 900
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]


def run(*args: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    try:
        done = subprocess.run([*PYTEST, *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return -1, f"not done after {timeout_s:g} s"
    return done.returncode, done.stdout + done.stderr


def break_one(sabotage: Sabotage) -> bool:
    """Whether every test that should have noticed has."""
    started = time.monotonic()
    code, output = run("-p", "tests.sabotage.plugin", "--sabotage", sabotage.name, *sabotage.tests)
    verdict = "red" if code == 0 else "GREEN"
    print(f"{verdict:6} {sabotage.name:28} {time.monotonic() - started:5.1f} s  {sabotage.breaks}", flush=True)
    if code != 0:
        print("\n".join(f"       {line}" for line in output.splitlines()[-25:]), flush=True)
    return code == 0


def main() -> int:
    names = sys.argv[1:]
    unknown = {*names} - {sabotage.name for sabotage in TABLE}
    if unknown:
        sys.exit(f"no sabotage is named {', '.join(sorted(unknown))}")
    chosen = [sabotage for sabotage in TABLE if not names or sabotage.name in names]
    code, output = run(*sorted({test for sabotage in chosen for test in sabotage.tests}), timeout_s=ALL_TIMEOUT_S)
    if code != 0:
        print(f"The tests fail without any sabotage:\n{output}")
        return 1
    with ThreadPoolExecutor(max_workers=2) as pool:
        verdicts = list(pool.map(break_one, chosen))
    print(f"{sum(verdicts)} of {len(verdicts)} sabotages are noticed")
    return 0 if all(verdicts) and verdicts else 1


if __name__ == "__main__":
    sys.exit(main())

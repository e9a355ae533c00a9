"""Puts one deliberate bug after another into the simulated cluster, and counts the seeds until the simulator notices.

    python scripts/sim_sabotage.py [NAME ...]

Exits with an error if a bug is not noticed within its number of seeds. A seed counts only if its run is clean without
the bug.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sabotage.sim.search import Found, Row, search
from tests.sabotage.sim.table import TABLE

ROWS = {row.name: row for row in TABLE}
LINE = "{:<34} {:<18} {:>5} {:>7}  {}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; all without")
    parser.add_argument("--processes", type=int, default=2, help="how many to search for at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - ROWS.keys():
        parser.error(f"no sabotage has the name {', '.join(sorted(unknown))}; there are: {', '.join(ROWS)}")
    names = arguments.names or list(ROWS)
    print(LINE.format("sabotage", "where", "seeds", "seconds", "violates"))
    with ProcessPoolExecutor(max(1, arguments.processes)) as pool:
        found = [_show(ROWS[name], one) for name, one in zip(names, pool.map(_search, names), strict=True)]
    print(f"{sum(found)} of {len(found)} were noticed")
    sys.exit(0 if all(found) else 1)


def _search(name: str) -> Found | None:
    return search(ROWS[name])


def _show(row: Row, found: Found | None) -> bool:
    where = row.scenario or row.shape
    if found is None:
        print(LINE.format(row.name, where, f">{row.max_seeds}", "", "NOT NOTICED"), flush=True)
    else:
        print(LINE.format(row.name, where, found.seed + 1, f"{found.seconds:.1f}", found.problem[:90]), flush=True)
    return found is not None


if __name__ == "__main__":
    main()

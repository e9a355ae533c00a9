"""Prints a constraints file for pip with the lowest version that pyproject.toml allows of each package that Onward runs
with, and of each package of the named extras:

    python scripts/lowest_versions.py torch client otel > constraints.txt
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

_PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def lowest_versions(requirements: Iterable[str]) -> Iterator[str]:
    """Returns `name==version` for each requirement that applies to this platform. A requirement without a lower bound is an
    error, except for extras of Onward itself."""
    for requirement in map(Requirement, requirements):
        if requirement.name == "onward" or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        bounds = [one.version.removesuffix(".*") for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if len(bounds) != 1:
            raise ValueError(f"{requirement} has no lower bound")
        yield f"{requirement.name}=={bounds[0]}"


def main(extras: list[str]) -> None:
    project = tomllib.loads(_PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    print("\n".join(lowest_versions(requirements)))


if __name__ == "__main__":
    main(sys.argv[1:])

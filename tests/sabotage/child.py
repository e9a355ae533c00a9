"""Runs a module of ours as `python -m` does, with one rule broken: `python -m tests.sabotage.child NAME MODULE …`."""

import runpy
import sys

from tests.sabotage.patches import Patches, Sabotage
from tests.sabotage.table import TABLE


def row(name: str) -> Sabotage:
    [found] = [sabotage for sabotage in TABLE if sabotage.name == name]
    return found


def sabotaged(command: list[str], name: str) -> list[str]:
    """The command of a process, so that the rule is broken there too; others are left as they are."""
    at = command.index("-m") + 1 if "-m" in command else len(command)
    if not "".join(command[at : at + 1]).startswith("onward."):
        return command
    return [*command[:at], "tests.sabotage.child", name, *command[at:]]


def main() -> None:
    name, module, *rest = sys.argv[1:]
    row(name).apply(Patches())
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

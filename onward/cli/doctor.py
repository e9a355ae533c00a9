"""`onward doctor`: shows what this machine has, and whether that is enough for `onward serve` with the same flags.

Of a model whose files are here it checks config, headers and texts, as a start does. It fetches and converts nothing.

Exit status 0: a server would start. 1: at least one line is a problem that would stop it. `--json` is for scripts:

{"can_serve": bool, "checks": [{"name", "level": "ok" | "warning" | "problem", "message", "advice"}]}
"""

import argparse
import dataclasses
import sys
from dataclasses import replace

import msgspec
from rich.console import Console
from rich.text import Text

from onward.cli import flag_groups
from onward.cli.flags import add_grouped_flags, from_args
from onward.cli.machine_checks import CheckLevel, MachineCheck, can_serve, check_machine
from onward.cli.machine_facts import read_facts
from onward.cli.serve import check_model_given
from onward.config import ServeConfig

STYLES = {CheckLevel.OK: "green", CheckLevel.WARNING: "yellow", CheckLevel.PROBLEM: "bold red"}
_NAME_WIDTH = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="model to check; the same as --model")
    parser.usage = "onward doctor [MODEL] [flags of onward serve] [--json]"
    add_grouped_flags(parser, ServeConfig, flag_groups.SERVE)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(args: argparse.Namespace) -> int:
    check_model_given(args)
    config: ServeConfig = from_args(args, ServeConfig)
    if args.model_argument:
        config = replace(config, model=args.model_argument)
    checks = check_machine(read_facts(config))
    if args.json:
        shown = {"can_serve": can_serve(checks), "checks": [dataclasses.asdict(check) for check in checks]}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    else:
        _print(checks)
    return 0 if can_serve(checks) else 1


def _print(checks: list[MachineCheck]) -> None:
    console = Console(highlight=False)
    for check in checks:
        line = Text.assemble(
            (f"{check.level:<8}", STYLES[check.level]), f" {check.name:<{_NAME_WIDTH}} {check.message}"
        )
        console.print(line, soft_wrap=True)
        if check.advice:
            console.print(Text(f"{'':<8} {'':<{_NAME_WIDTH}} -> {check.advice}"), soft_wrap=True)
    counts = [sum(check.level is level for check in checks) for level in (CheckLevel.PROBLEM, CheckLevel.WARNING)]
    verdict = "onward serve can start" if can_serve(checks) else "onward serve would not start"
    console.print(f"\n{verdict}: {counts[0]} problem(s), {counts[1]} warning(s)")

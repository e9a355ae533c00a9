"""`onward models`: lists, shows and removes cached models."""

import argparse
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from onward.config import cache_dir, hub_cache_dir
from onward.errors import OnwardError, StartupError
from onward.models.loader import cached_models
from onward.models.loader.cached_models import ModelCacheEntry
from onward.obs.tables import print_table

_UNITS = ("B", "kB", "MB", "GB", "TB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    shown = actions.add_parser("list", help="list models and their sizes (the default)")
    shown.add_argument("--json", action="store_true", help="print JSON, for scripts")
    show = actions.add_parser("show", help="show a model's path, revisions and files")
    show.add_argument("name", metavar="NAME", help="name as listed, or a prefix of it")
    prune = actions.add_parser(
        "prune", help="remove the named models; without names, all converted models that no server uses"
    )
    prune.add_argument(
        "names", nargs="*", metavar="NAME", help="names as listed; models of the hub are removed only by name"
    )
    prune.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    models = cached_models.list_models(cache_dir(), hub_cache_dir())
    match args.action:
        case "show":
            show(console, cached_models.find_model(models, args.name))
        case "prune":
            return prune(console, chosen(models, args.names), is_confirmed=args.yes)
        case _ if getattr(args, "json", False):
            rows = [cached_models.to_builtins(model) for model in models]
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n")
        case _:
            list_all(console, models)
    return 0


def list_all(console: Console, models: list[ModelCacheEntry]) -> None:
    if not models:
        console.print(f"nothing is cached in {cache_dir()} and {hub_cache_dir()}", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("name", "kind", "size", "in use", "what"):
        table.add_column(title, no_wrap=True, justify="right" if title == "size" else "left")
    for model in models:
        in_use = "yes" if model.is_in_use else ""
        table.add_row(model.name, model.kind, size_text(model.size), in_use, model.description)
    print_table(console, table)
    console.print(f"{size_text(sum(model.size for model in models))} in all")


def show(console: Console, model: ModelCacheEntry) -> None:
    rows = [
        ("name", model.name),
        ("kind", model.kind),
        ("path", str(model.path)),
        ("size", size_text(model.size)),
        ("in use", "yes" if model.is_in_use else "no"),
        ("what", model.description),
    ]
    for title, text in rows:
        console.print(f"{title:<8} {text}", soft_wrap=True, markup=False)
    for name, size in cached_models.list_files(model):
        console.print(f"{size_text(size):>10}  {name}", soft_wrap=True, markup=False)


def chosen(models: list[ModelCacheEntry], names: list[str]) -> list[ModelCacheEntry]:
    """Returns the models to remove. Raises `StartupError` for a named model that is in use, before anything is
    removed."""
    if not names:
        return [model for model in models if model.is_pruned_by_default]
    named = list({model.path: model for name in names if (model := cached_models.find_model(models, name))}.values())
    for model in named:
        if model.is_in_use:
            raise StartupError(f"{model.name} is in use; stop the server that serves it first")
    return named


def prune(console: Console, models: list[ModelCacheEntry], *, is_confirmed: bool) -> int:
    if not models:
        console.print("there is nothing to remove")
        return 0
    for model in models:
        console.print(f"{size_text(model.size):>10}  {model.name} ({model.kind})", soft_wrap=True, markup=False)
    if not is_confirmed and not _agrees(sum(model.size for model in models)):
        console.print("nothing was removed")
        return 1
    failures: list[OnwardError] = []
    for model in models:
        try:
            cached_models.remove_model(model)
        except OnwardError as fault:
            failures.append(fault)
            print(f"onward models: {fault.message}", file=sys.stderr)
        else:
            console.print(f"removed {model.name}", soft_wrap=True, markup=False)
    return 1 if failures else 0


def _agrees(size: int) -> bool:
    if not sys.stdin.isatty():
        raise StartupError("there is no terminal to ask whether to remove this; --yes removes it without asking")
    print(f"Remove this ({size_text(size)})? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def size_text(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} {_UNITS[0]}"

"""`onward warm`: does the work of a first start in advance: fetches and converts the model, and compiles the
kernels."""

import argparse
import dataclasses

from rich.console import Console

from onward.cli.flags import add_flags, from_args
from onward.cli.progress import ProgressDisplay
from onward.cli.serve import check, prepare_model
from onward.config import ServeConfig, WorkerConfig, derive_config
from onward.offline.inputs import LLM_ARGS

WARM_FLAGS = ("model", *(name for name in LLM_ARGS if name != "chat_template"))
"""Flags that decide what is fetched, converted and compiled, and what has to fit into memory for it. Other flags of
`onward serve` have no effect on that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    skipped = tuple(field.name for field in dataclasses.fields(ServeConfig) if field.name not in WARM_FLAGS)
    add_flags(parser, ServeConfig, skip=skipped)


def run(args: argparse.Namespace) -> int:
    config: ServeConfig = from_args(args, ServeConfig)
    check(config)
    console = Console(stderr=True)
    with ProgressDisplay(console) as progress:
        model = prepare_model(config, progress)
        worker_config = derive_config(config, WorkerConfig, kv_backend=None)
        from onward.worker.runner_factory import open_runner

        open_runner(model, worker_config, progress)
    console.print(f"{model.name} is ready in {model.folder}", highlight=False, soft_wrap=True)
    return 0

"""`onward bench offline`: measures how fast a model is in this process, without a server, and how long it takes to be
ready."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from onward.bench import environment, offline
from onward.bench.model_shapes import SHAPES, write_config
from onward.cli.flags import add_flags
from onward.config import ServeConfig
from onward.errors import InvalidRequest
from onward.offline.inputs import LLM_ARGS

SCHEMA = 1
WORKLOADS = ("256", "single", "prompt")
DEFAULT_WORKLOADS = ("256", "single")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        help=f"a model, or one of these shapes with random weights: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--workload",
        choices=WORKLOADS,
        action="append",
        help=f"what to measure (may be given several times) [{' and '.join(DEFAULT_WORKLOADS)}]",
    )
    parser.add_argument(
        "--requests", type=int, default=256, metavar="N", help='number of requests of the workload "256" [%(default)s]'
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=32_768,
        metavar="N",
        help='length of the prompt of the workload "prompt" [%(default)s]',
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="number of runs, after a warm-up run [%(default)s]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which all figures are written")
    skipped = tuple(f.name for f in dataclasses.fields(ServeConfig) if f.name not in LLM_ARGS)
    add_flags(parser, ServeConfig, skip=skipped)


def run(args: argparse.Namespace) -> int:
    for name in ("requests", "runs", "prompt_tokens"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be at least 1", param=name)
    llm_args: dict[str, Any] = {name: getattr(args, name) for name in LLM_ARGS if getattr(args, name) is not None}
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model_argument
        if model in SHAPES:
            write_config(Path(folder), model)
            model, llm_args = folder, {"load_format": "dummy"} | llm_args
        from onward.llm import LLM

        with LLM(model, **llm_args) as llm:
            ready_s = offline.process_age_s()
            console.print(f"{args.model_argument}: ready {ready_s:.1f} s after the process was started")
            figures = [_measure(llm, name, args) for name in args.workload or DEFAULT_WORKLOADS]
    for measured in figures:
        console.print(_line(measured), soft_wrap=True)
    if args.json is not None:
        document = _document(args, llm_args, ready_s, figures)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return 0


def _measure(llm: Any, workload: str, args: argparse.Namespace) -> offline.OfflineFigures:
    if workload == "single":
        return offline.measure_single(llm, num_runs=args.runs)
    if workload == "prompt":
        return offline.measure_prompt(llm, num_runs=args.runs, prompt_tokens=args.prompt_tokens)
    return offline.measure_batch(llm, offline.workload_256(args.requests), num_runs=args.runs)


def _line(figures: offline.OfflineFigures) -> str:
    runs = ", ".join(f"{figures.num_output_tokens / seconds:.0f}" for seconds in figures.runs_s)
    if figures.ms_per_token is not None:
        return f"one stream: {figures.ms_per_token:.3f} ms per token"
    if figures.first_token_s is not None:
        return f"one prompt of {figures.num_prompt_tokens} tokens: {figures.first_token_s:.3f} s to its first token"
    return (
        f"{figures.name} requests, {figures.num_output_tokens} tokens: {figures.tokens_per_s:.0f} tok/s (runs {runs})"
    )


def _document(
    args: argparse.Namespace, llm_args: dict[str, Any], ready_s: float, figures: list[offline.OfflineFigures]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "environment": environment.describe_machine(),
        "model": args.model_argument,
        "knobs": llm_args,
        "ready_s": ready_s,
        "figures": figures,
    }

"""`onward bench` beside other load generators: the same load on the same server, in alternation.

    python -m benchmarks.clients [--guidellm FILE] [--aiperf FILE] [--evalscope FILE] [--paced] [--pairs 5] [-- FLAGS…]

Each FILE is the program's executable, in a virtual environment of its own. The server is `onward serve` with the default
model and FLAGS, or with `--paced` one that computes nothing and keeps to a timetable. The server has one half of the cores
and the load generators the other: a program that takes processor time from the server measures another server.

A machine's speed changes from minute to minute, so each run of another program is paired with a run of ours, before or
after it in turn. The result is the median of the pairs' ratios. Exits with 1 where a median is more than 10 % from 1.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.clients import paced_server
from benchmarks.clients.figures import COMPARED, Pair, all_agree, compare, table
from benchmarks.clients.paced_server import PacedProcess
from benchmarks.clients.programs import AiPerf, EvalScope, GuideLlm, Load, Onward, Program
from benchmarks.harness.serving import ServeProcess
from onward import config
from onward.bench import load as onward_load
from onward.bench.load import BenchTarget
from onward.models.loader import model_store
from onward.proto.model import PreparedModel


def main() -> int:
    args, flags = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as with Ctrl-C, what was started is stopped first
    model = model_store.prepare(config.DEFAULT_MODEL)
    name = paced_server.MODEL if args.paced else model.name
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="clients-", dir=args.out))
    peers = _peers(args, model, folder)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[:half] or cores)  # what is started from here on inherits it
    with PacedProcess() if args.paced else ServeProcess(*_serve_flags(max(1, half)), *flags) as server:
        os.sched_setaffinity(0, cores[half:])
        load = Load(
            server.url,
            name,
            args.streams,
            args.requests,
            args.prompt_tokens,
            args.output_tokens,
            asyncio.run(_num_words(BenchTarget(server.url, name), args.prompt_tokens)),
        )
        pairs = _measure(peers, load, args.pairs, folder)
    (folder / "pairs.json").write_text(json.dumps([asdict(pair) for pair in pairs], indent=2), encoding="utf-8")
    print(f"\n{table(pairs)}\n\nwritten to {folder}")
    return 0 if all_agree(pairs) else 1


def _serve_flags(num_threads: int) -> list[str]:
    return ["--log-level", "warning", "--threads", str(num_threads)]


def _peers(args: argparse.Namespace, model: PreparedModel, folder: Path) -> list[Program]:
    peers: list[Program] = []
    if args.guidellm:
        peers.append(GuideLlm(args.guidellm))
    if args.aiperf:
        peers.append(AiPerf(args.aiperf, _tokenizer_folder(model, folder / "tokenizer")))
    if args.evalscope:
        peers.append(EvalScope(args.evalscope))
    if not peers:
        raise SystemExit("name at least one of --guidellm, --aiperf, --evalscope")
    return peers


def _tokenizer_folder(model: PreparedModel, folder: Path) -> Path:
    """The model's tokenizer as transformers loads it without a hub."""
    assert model.tokenizer is not None, "the default model has one"
    folder.mkdir()
    shutil.copy(Path(model.folder) / model.tokenizer, folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.bos_token,
        "eos_token": model.eos_token,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


async def _num_words(target: BenchTarget, prompt_tokens: int) -> int:
    async with onward_load.new_session(target) as session:
        return await onward_load.calibrate_prompt_words(session, target, prompt_tokens, "clients")


def _measure(peers: list[Program], load: Load, num_pairs: int, folder: Path) -> list[Pair]:
    ours = Onward()
    ours.measure(load, "warm-up", folder / "warm-up")
    pairs: list[Pair] = []
    for number in range(num_pairs):
        for peer in peers:
            order: list[Program] = [ours, peer] if number % 2 == 0 else [peer, ours]
            name = f"{number}-{peer.name}"
            found = {
                program: program.measure(load, f"{name} {program.name} {time.time_ns()}", folder / name / program.name)
                for program in order
            }
            pairs.append(Pair(peer.name, found[ours], found[peer]))
            print(f"pair {number + 1}, {_line(pairs[-1])}", flush=True)
    return pairs


def _line(pair: Pair) -> str:
    ratios = {name: compare([pair], figure) for name, figure in COMPARED.items()}
    told = "; ".join(f"{name} {one.ours:.2f} : {one.theirs:.2f}" for name, one in ratios.items() if one is not None)
    return f"ours : {pair.peer}: {told}"


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    ours, flags = sys.argv[1:], []
    if "--" in ours:
        ours, flags = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", metavar="FILE")
    parser.add_argument("--aiperf", metavar="FILE")
    parser.add_argument("--evalscope", metavar="FILE")
    parser.add_argument("--paced", action="store_true", help="a server that computes nothing, in place of the model")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="with each program [%(default)s]")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="in each run [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="[%(default)s]")
    return parser.parse_args(ours), flags


if __name__ == "__main__":
    sys.exit(main())

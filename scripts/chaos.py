"""`make chaos`: a cluster of the default model under load while its processes are killed, stopped, drained and replaced.

Prints what happens, writes the figures, and fails if any answer differs from the undisturbed one.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.chaos import ALL_FAULTS, ROUTER_FLAGS, Chaos, Plan, Report  # noqa: E402
from tests.e2e.cluster import Cluster  # noqa: E402

STANDBY = ("--standby-worker", "on")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults at instances")
    parser.add_argument(
        "--router-seconds", type=float, default=None, help="of a router being killed (default: a fifth)"
    )
    parser.add_argument("--clients", type=int, default=32, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each choice")
    parser.add_argument(
        "--mixed", action="store_true", help="two mixed instances with standby workers, instead of prefill and decode"
    )
    parser.add_argument("--seed", type=int, default=None, help="chooses faults and victims")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="FOLDER", help="[bench-results]")
    parser.add_argument("--logs", type=Path, default=None, help="folder that gets all logs")
    return parser.parse_args()


def run(args: argparse.Namespace) -> Report:
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    router_seconds = args.seconds / 5 if args.router_seconds is None else args.router_seconds
    plan = Plan(args.seconds, router_seconds, args.clients, args.max_tokens, seed)
    prefill: tuple[tuple[str, ...], ...] = ((),)
    decode: tuple[tuple[str, ...], ...] = ((), ())
    mixed: tuple[tuple[str, ...], ...] = ()
    if args.mixed:
        plan = replace(plan, roles={"mixed": ALL_FAULTS})
        prefill, decode, mixed = (), (), (STANDBY, STANDBY)
    started_s = time.monotonic()
    with Cluster(router=ROUTER_FLAGS, prefill=prefill, decode=decode, mixed=mixed) as cluster:
        chaos = Chaos(cluster, plan, lambda line: print(f"{time.monotonic() - started_s:7.1f}  {line}", flush=True))
        try:
            return chaos.run()
        finally:
            if args.logs is not None:
                cluster.write_logs(args.logs)


def main() -> int:
    args = parse()
    report = run(args)
    figures = json.dumps(report.figures(), indent=2)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "chaos.json").write_text(figures + "\n")
    print(figures)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

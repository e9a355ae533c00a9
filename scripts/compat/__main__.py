"""`make compat`: prints what passed, failed and does not apply for each client, and writes `docs/compatibility.md`.

    make compat                                              all clients
    make compat ARGS='--only langchain,openai-js'            some of them
    make compat ARGS='--suite vllm --checkout ~/vllm'        a suite of another server, from a checkout

Fails if a check failed. Logs are in build/compat/logs.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from onward.version import __version__
from tests.e2e.cluster import Cluster

from .clients import CLIENTS
from .installs import install
from .javascript_types import TYPES, run_javascript_types
from .page import write_page
from .results import RESULTS, CheckResult, Outcome, Results, SuiteResult, Target, count, read_results, write_results
from .run_client import run_client
from .suites import SUITES, ServerSuite, run_suite

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "compat"
LOGS = FOLDER / "logs"
MODEL = "smollm2-135m-instruct"
ALL = (*CLIENTS, TYPES)
EVERY = ("--max-num-seqs", "24", "--max-model-len", "1024", "--log-interval-s", "0", "--stopped-timeout-s", "120")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, metavar="NAMES", help="clients, separated by commas")
    parser.add_argument("--suite", choices=sorted(SUITES), default=None, help="a suite of another server")
    parser.add_argument("--checkout", type=Path, default=None, metavar="FOLDER", help="where that suite's source is")
    args = parser.parse_args()
    if (args.suite is None) != (args.checkout is None):
        parser.error("--suite and --checkout belong together")
    return args


def chosen(only: str | None) -> list[str]:
    names = [client.name for client in ALL]
    if only is None:
        return names
    wanted = only.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(names)}")
    return wanted


def main() -> int:
    args = parse()
    if args.suite is not None:
        return run_one_suite(SUITES[args.suite], args.checkout.resolve())
    wanted = chosen(args.only)
    LOGS.mkdir(parents=True, exist_ok=True)
    clients = [client for client in ALL if client.name in wanted]
    for client in clients:
        print(f"installing {client.name}", flush=True)
        install(client, FOLDER / client.name)
    results = read_results() if RESULTS.exists() else Results(__version__, MODEL, [])
    num_failed = 0
    with Cluster(every=EVERY, prefill=(), decode=(), mixed=((),)) as cluster:
        urls = {Target.DIRECT: cluster.instances[0].url, Target.ROUTER: cluster.url}
        for client in clients:
            targets = {}
            for target, url in urls.items():
                log = LOGS / f"{client.name}-{target.value}.log"
                run = run_javascript_types if client is TYPES else partial(run_client, client)
                checks = run(FOLDER / client.name, url, MODEL, log)
                targets[target] = count(checks)
                num_failed += len(targets[target].failed)
                show(f"{client.name}, {target.value}", targets[target].summary(), checks)
            results = results.updated(SuiteResult(client.name, client.version, targets))
            write_results(results)
            write_page(results)
    return 1 if num_failed else 0


def run_one_suite(suite: ServerSuite, checkout: Path) -> int:
    """The results are not for the page: they depend on the checkout."""
    LOGS.mkdir(parents=True, exist_ok=True)
    install(suite.environment, FOLDER / suite.name)
    num_failed = 0
    names = ("--model", MODEL, "--served-model-name", MODEL, *suite.served_names)
    with Cluster(every=(*EVERY, *names), prefill=(), decode=(), mixed=((),)) as cluster:
        for target, url in {Target.DIRECT: cluster.instances[0].url, Target.ROUTER: cluster.url}.items():
            log = LOGS / f"{suite.name}-{target.value}.log"
            checks = run_suite(suite, checkout, FOLDER / suite.name, url, log)
            num_failed += len(count(checks).failed)
            show(f"{suite.name}, {target.value}", count(checks).summary(), checks)
            for reason, number in count(checks).not_applicable.items():
                print(f"    not applicable, {reason.value}: {number}")
    return 1 if num_failed else 0


def show(name: str, summary: str, checks: list[CheckResult]) -> None:
    print(f"{name:32} {summary}", flush=True)
    for one in checks:
        if one.outcome is Outcome.FAILED:
            print(f"    {one.name}: {one.detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

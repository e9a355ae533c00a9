"""The long run of the fuzzer: every target, many cases, a table at the end. What fails is kept in `tests/fuzz_corpus/`.

    make fuzz                                  130,000 cases
    make fuzz ARGS='--cases 1000000 --seed 5'
    make fuzz ARGS='--only gguf cursor'

Memory is bounded, so that a case that asks for all of it ends here and not with the machine.
"""

import argparse
import hashlib
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fuzz.case import CORPUS
from tests.fuzz.run import Finding, Outcome, fuzz
from tests.fuzz.targets import TARGETS

NUM_CASES = 130_000
MAX_MEMORY_BYTES = 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="of all targets together [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    per_target = -(-args.cases // len(args.only))
    outcomes: dict[str, Outcome] = {}
    print(f"{'target':14} {'cases':>8} {'taken':>8} {'cases/s':>8}")
    for name in args.only:
        outcomes[name] = outcome = fuzz(TARGETS[name], per_target, args.seed)
        rate = outcome.num_cases / outcome.seconds
        print(f"{name:14} {outcome.num_cases:8} {outcome.num_taken:8} {rate:8.0f}", flush=True)
        if outcome.finding is not None:
            print(f"  {outcome.finding.fault}\n  kept as {_keep(name, outcome.finding)}", flush=True)
    _sum_up(outcomes)
    return any(outcome.finding is not None for outcome in outcomes.values())


def _keep(name: str, finding: Finding) -> Path:
    path = CORPUS / name / f"{hashlib.sha256(finding.data).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(finding.data)
    return path


def _sum_up(outcomes: dict[str, Outcome]) -> None:
    cases = sum(outcome.num_cases for outcome in outcomes.values())
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    findings = sum(outcome.finding is not None for outcome in outcomes.values())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{cases} cases in {seconds:.0f} s, {findings} findings, at most {peak_mb} MB")


if __name__ == "__main__":
    sys.exit(main())

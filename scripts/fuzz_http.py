"""Cases made from `/openapi.json` by schemathesis, sent over real HTTP to two api processes with a stand-in engine.

    make fuzz-http                              3,000 cases, half of them as the document says, half against it
    make fuzz-http ARGS='--cases 20000 --seed 5'

Fails at the first answer with a server error, at a request without an answer, and at a process that has died. Also fails
if the engine holds anything at the end.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from onward.config import ApiConfig
from tests.api import small_model
from tests.api.instance import Instance, running

NUM_CASES = 3000
ANSWER_WITHIN_S = 30.0
LEFT_OUT = {"/drain"}
"""It ends the run by what it is for."""
REQUIRED = {"model", "messages", "prompt", "prompt_token_ids", "ids", "all"}
WEIGHTS = {"/v1/chat/completions": 12, "/v1/completions": 12, "/v1/generate": 12, "/v1/abort": 4}
"""How many cases a route gets for each one that the others get."""


class HttpRun:
    def __init__(self, instance: Instance, seed: int) -> None:
        self._seed = seed
        self._schema = schemathesis.openapi.from_url(f"{instance.url}/openapi.json")
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.num_cases = 0

    def operations(self) -> list[Any]:
        found = [one.ok() for one in self._schema.get_all_operations()]
        return [one for one in found if one.path not in LEFT_OUT]

    def run(self, operation: Any, mode: GenerationMode, num_cases: int) -> None:
        @seed(self._seed)
        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.integers(0, 4), st.randoms(use_true_random=False))
        def attempt(case: Any, num_kept: int, chance: Random) -> None:
            if isinstance(case.body, dict) and num_kept < 4:
                case.body = _with_few(case.body, num_kept, chance)
            self._check(operation.path, case)

        attempt()

    def _check(self, path: str, case: Any) -> None:
        self.num_cases += 1
        answer = case.call(timeout=ANSWER_WITHIN_S)
        self.statuses[path, answer.status_code] += 1
        if answer.status_code == 504 and isinstance(case.body, dict) and case.body.get("deadline_ms"):
            return  # the client's own deadline, kept
        assert answer.status_code < 500, f"{answer.status_code} from {path}: {answer.content[:500]!r}"
        if answer.status_code >= 400 and case.method != "HEAD":
            assert answer.status_code in (404, 405) or answer.json()["error"]["message"], answer.content[:500]


def _with_few(body: dict[str, Any], num_kept: int, chance: Random) -> dict[str, Any]:
    """Values are drawn by their types alone, so of many fields one is nearly always out of its range."""
    optional = sorted(set(map(str, body)) - REQUIRED)
    kept = REQUIRED | set(chance.sample(optional, min(num_kept, len(optional))))
    return {name: value for name, value in body.items() if name in kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = small_model.prepare(Path(folder))
        config = ApiConfig(batch_dir=f"{folder}/batches", serve_config={"port": 0})
        with running(model, config, num_api=2) as instance:
            http = HttpRun(instance, args.seed)
            _run_all(http, args.cases)
            instance.wait_until(lambda: not instance.engine.running)
            assert all(child.process.poll() is None for child in instance.children), "a process has ended"
    for (path, status), count in sorted(http.statuses.items()):
        print(f"{path:28} {status} {count:6}")
    seconds = time.perf_counter() - began_s
    print(f"{http.num_cases} cases in {seconds:.0f} s; no fault of the server, nothing left behind")
    return 0


def _run_all(http: HttpRun, num_cases: int) -> None:
    operations = http.operations()
    total = sum(WEIGHTS.get(one.path, 1) for one in operations)
    for operation in operations:
        share = -(-num_cases * WEIGHTS.get(operation.path, 1) // total)
        modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:
            http.run(operation, mode, -(-share // len(modes)))
    while http.num_cases < num_cases:  # routes that take nothing have few cases
        http.run(operations[0], GenerationMode.POSITIVE, num_cases - http.num_cases)


if __name__ == "__main__":
    sys.exit(main())

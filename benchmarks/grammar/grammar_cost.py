"""`make bench-grammar`: what grammars cost, over 200 made-up schemas and the default model's vocabulary.

For each schema: compiling it, and for each token of some outputs making the mask and moving on. Outputs are drawn evenly
among all allowed tokens, so they wander where no model would; what a model writes costs less.
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onward.bench import environment
from onward.grammar.grammar_compiler import GrammarCompiler
from onward.models.loader.model_store import prepare
from onward.proto.sampling_params import Grammar
from onward.text.tokenizer import Tokenizer

NUM_SCHEMAS = 200
OUTPUTS_PER_SCHEMA = 2
MAX_TOKENS = 120
_NAMES = ("id", "name", "title", "tags", "price", "created_at", "address", "items", "note", "status", "count", "email")


class TimingPercentiles(msgspec.Struct, frozen=True):
    """Microseconds."""

    count: int
    p50: float
    p99: float
    max: float


class GrammarCosts(msgspec.Struct, frozen=True):
    num_schemas: int
    schema_bytes: TimingPercentiles
    set_up_s: float
    compile_us: TimingPercentiles
    mask_us: TimingPercentiles
    advance_us: TimingPercentiles
    replay_us_per_token: float
    megabytes: float
    """By which the process has grown."""


def schema_of(seed: int) -> dict[str, Any]:
    choose = random.Random(seed)
    return _object(choose, depth=choose.randint(1, 3))


def _object(choose: random.Random, depth: int) -> dict[str, Any]:
    names = choose.sample(_NAMES, choose.randint(2, 8))
    return {
        "type": "object",
        "properties": {name: _value(choose, depth) for name in names},
        "required": names[: choose.randint(1, len(names))],
        "additionalProperties": False,
    }


def _value(choose: random.Random, depth: int) -> dict[str, Any]:
    nested = [lambda: _object(choose, depth - 1), lambda: _list(choose, depth)] if depth > 1 else []
    plain = [
        lambda: {"type": "string", "maxLength": choose.randint(5, 200)},
        lambda: {"type": "string"},
        lambda: {"type": "integer", "minimum": 0, "maximum": 10 ** choose.randint(1, 9)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"enum": [f"value-{choose.randint(0, 99)}" for _ in range(choose.randint(2, 12))]},
        lambda: {"type": "string", "format": choose.choice(("date", "date-time", "uuid", "email"))},
        lambda: {"type": "string", "pattern": "^[A-Z]{2,5}-[0-9]{1,8}$"},
        lambda: {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    ]
    return choose.choice(plain + 3 * nested)()


def _list(choose: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _value(choose, depth - 1), "maxItems": choose.randint(1, 20)}


def measure(tokenizer: Tokenizer, num_schemas: int = NUM_SCHEMAS) -> GrammarCosts:
    before_kb, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    grammars = GrammarCompiler(tokenizer, max_compiled=num_schemas)
    set_up_s = time.perf_counter() - began_s
    sizes, compiles, masks, advances = [], [], [], []
    num_replayed, replay_s = 0, 0.0
    for seed in range(num_schemas):
        grammar = Grammar("json_schema", json.dumps(schema_of(seed)))
        sizes.append(len(grammar.source))
        compiles.append(_timed_us(lambda g=grammar: grammars.check(g)))
        for turn in range(OUTPUTS_PER_SCHEMA):
            token_ids = _walk(grammars, grammar, seed * OUTPUTS_PER_SCHEMA + turn, masks, advances)
            num_replayed += len(token_ids)
            replay_s += _timed_us(lambda g=grammar, ids=token_ids: grammars.matcher(g, ids)) / 1e6
    return GrammarCosts(
        num_schemas=num_schemas,
        schema_bytes=_times(sizes),
        set_up_s=round(set_up_s, 3),
        compile_us=_times(compiles),
        mask_us=_times(masks),
        advance_us=_times(advances),
        replay_us_per_token=round(1e6 * replay_s / max(1, num_replayed), 2),
        megabytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024,
    )


def _walk(
    grammars: GrammarCompiler, grammar: Grammar, seed: int, masks: list[float], advances: list[float]
) -> list[int]:
    choose, matcher, token_ids = random.Random(seed), grammars.matcher(grammar), []
    while len(token_ids) < MAX_TOKENS and not matcher.done:
        masks.append(_timed_us(matcher.mask))
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask().bits, np.uint8), bitorder="little"))
        token_ids.append(int(choose.choice(allowed)))
        advances.append(_timed_us(lambda: matcher.advance(token_ids[-1])))
    return token_ids


def _timed_us(work: Any) -> float:
    began_s = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began_s)


def _times(samples: list[float]) -> TimingPercentiles:
    ordered = sorted(samples)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return TimingPercentiles(len(ordered), round(at[0], 1), round(at[1], 1), round(ordered[-1], 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.grammar.grammar_cost", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose vocabulary (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there")
    args = parser.parse_args()
    model = prepare(args.model)
    assert model.tokenizer is not None, "a model with a tokenizer"
    costs = measure(Tokenizer.from_file(Path(model.folder) / model.tokenizer))
    print(msgspec.json.format(msgspec.json.encode(costs), indent=2).decode())
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode({"costs": costs, "environment": environment.describe_machine()}))


if __name__ == "__main__":
    main()

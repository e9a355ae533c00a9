"""What grammars cost on the device: streams without one, with one among them, and all under one.

    python -m benchmarks.gpu.grammars SHAPE [--streams 64] [--tokens 200]

In this process, prompts of 128 random ids; the second of two runs counts.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from onward.bench.model_shapes import SHAPES, write_config, write_tokenizer
from onward.llm import LLM, SamplingOptions
from onward.proto.sampling_params import Grammar

WORDS = Grammar("regex", "[a-z ]{1,2000}")
PEOPLE = Grammar(
    "json_schema",
    '{"type": "array", "minItems": 200, "items": {"type": "object", "additionalProperties": false, "required": '
    '["name", "age"], "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}}',
)


def rate(llm: LLM, grammars: list[Grammar | None], num_tokens: int, generator: random.Random) -> float:
    """Tokens per second."""
    prompts = [[generator.randint(0, 9999) for _ in range(128)] for _ in grammars]
    options = [
        SamplingOptions(max_tokens=num_tokens, temperature=0.6, seed=number, ignore_eos=True, grammar=grammar)
        for number, grammar in enumerate(grammars)
    ]
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, options)
    took_s = time.perf_counter() - began_s
    for output in outputs:
        assert output.error is None, output.error
    return sum(len(output.token_ids) for output in outputs) / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    count, generator = args.streams, random.Random(0)
    kinds: dict[str, list[Grammar | None]] = {
        "no grammar": [None] * count,
        "one regex": [WORDS] + [None] * (count - 1),
        "all regex": [WORDS] * count,
        "all JSON": [PEOPLE] * count,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.shape)
        write_tokenizer(Path(folder), SHAPES[args.shape]["vocab_size"])
        llm = LLM(folder, device="cuda", load_format="dummy", max_num_batched_tokens=16384, max_model_len=4096)
        for name, grammars in kinds.items():
            rates = [rate(llm, grammars, args.tokens, generator) for _ in range(2)]
            print(f"{args.shape}, {count} streams, {name}: {rates[1]:.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()

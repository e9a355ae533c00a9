"""The requests of `benchmarks.gpu.exactness`: the streams that are compared, and those that run beside them."""

import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
KINDS = ("plain", "mixed")
MIXED: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"logprobs": 5},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
)
"""Options of the mixed streams. A third of the streams has each."""

_PERSON = {
    "type": "array", "minItems": 200,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    },
}  # fmt: skip
NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 200, "min_p": 0.01},
    {"logprobs": 5},
    {"prompt_logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {"7": 5.0, "11": -100.0}},
    {"guided_regex": "([a-z]{3} ){250}[a-z]{5}"},
    {"guided_json": _PERSON},
    {"n": 2},
)
"""What a request that runs beside the compared streams has. Embeddings come in addition."""


@dataclass(frozen=True, slots=True)
class Requests:
    num_streams: int
    prompt_len: int
    num_tokens: int
    vocab_size: int

    def prompt(self, number: int, length: int) -> list[int]:
        return random.Random(f"{number} {length}").choices(range(self.vocab_size), k=length)

    def prompt_len_of(self, stream: int) -> int:
        """Each stream has a length of its own, so that their positions in blocks and tiles differ."""
        return self.prompt_len + stream

    @property
    def max_hold(self) -> int:
        """Output of a request that outlives the compared streams."""
        return 2 * self.num_tokens

    @property
    def max_len(self) -> int:
        """The longest prompt with the longest output. Those beside the compared streams have a few tokens more."""
        return self.prompt_len_of(self.num_streams) + self.max_hold + len(NEIGHBOURS)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks of all compared streams at their full length."""
        lengths = (self.prompt_len_of(stream) + self.num_tokens for stream in range(self.num_streams))
        return sum(-(-length // block_size) for length in lengths)

    def body(self, number: int, prompt_len: int, salt: str) -> dict[str, Any]:
        return {
            "model": "m", "prompt": self.prompt(number, prompt_len), "max_tokens": self.num_tokens, "seed": number,
            "temperature": 0.7, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "cache_salt": salt,
        }  # fmt: skip

    def stream(self, stream: int, kind: str, salt: str) -> dict[str, Any]:
        """One of the compared streams. Requests that differ in their salt alone share no cached block."""
        body = self.body(stream, self.prompt_len_of(stream), salt)
        return body | (MIXED[stream % len(MIXED)] if kind == "mixed" else {})

    def stranger(self, number: int, salt: str) -> dict[str, Any]:
        """A plain request that is not compared, with a prompt between one token and the longest."""
        length = 1 + number * 997 % (self.prompt_len + self.num_streams)
        return self.body(10_000 + number, length, salt)

    def urgent(self, number: int, salt: str, num_tokens: int) -> dict[str, Any]:
        """A plain request for which others are preempted."""
        return self.body(40_000 + number, self.prompt_len, salt) | {"priority": -1, "max_tokens": num_tokens}

    def neighbours(self, salt: str) -> list[dict[str, Any]]:
        """One of every kind."""
        length = min(self.prompt_len, 150)
        return [self.body(20_000 + i, length + i, salt) | more for i, more in enumerate(NEIGHBOURS)]

    def embeddings(self) -> dict[str, Any]:
        length = min(self.prompt_len, 300)
        return {"model": "m", "input": [self.prompt(30_000 + i, length + i) for i in range(4)]}

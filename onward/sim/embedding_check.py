"""What a client that asks for vectors has received, checked against the hash model: of each text its own, once, in order.

There is nothing to go on with: who loses the connection asks again, and must be told the same.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from onward.proto.sampling_params import SamplingParams
from onward.sim.hash_worker import expected_embedding
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.scenario import SimRequest

PATH = "/v1/embeddings"


def texts_of(ask: SimRequest) -> list[str]:
    """As many as another request would have choices."""
    return [ask.prompt, *(f"{ask.prompt} {index}" for index in range(1, ask.n))]


def body_of(ask: SimRequest) -> dict[str, Any]:
    optional = {
        "pooling": ask.pooling or None,
        "priority": ask.priority or None,
        "deadline_ms": ask.deadline_ms,
        "cache_salt": ask.cache_salt or None,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    return {"model": "hash", "input": texts_of(ask), "normalize": False} | given


class EmbeddingChecker(ReplyChecker):
    def __init__(self, ask: SimRequest, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._ask, self._prompts = ask, prompts
        self._told: dict[str, Any] = {}

    def take_whole(self, body: bytes) -> None:
        self._told = msgspec.json.decode(body)

    def check_end(self) -> None:
        sampling = SamplingParams(seed=0, pooling="last" if self._ask.pooling == "last" else "mean")
        wanted = [array("f", expected_embedding(prompt, sampling)).tolist() for prompt in self._prompts]
        if [one["index"] for one in self._told["data"]] != list(range(len(wanted))):
            raise InvariantError(2, "not one vector for each text, in order")
        for index, (one, expected) in enumerate(zip(self._told["data"], wanted, strict=True)):
            if one["embedding"] != expected:
                raise InvariantError(2, f"text {index} gets {one['embedding']} instead of {expected}")
        self.num_tokens = sum(map(len, self._prompts))
        if self._told["usage"]["prompt_tokens"] != self.num_tokens:
            raise InvariantError(2, f"the usage is {self._told['usage']} instead of {self.num_tokens}")

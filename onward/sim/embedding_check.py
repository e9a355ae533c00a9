"""Checks the response to an embedding request against the hash model: one vector for each text, in order.

An embedding request cannot be resumed. A client that loses its connection sends the request again, and must get the
same vectors.
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


def texts_of(request: SimRequest) -> list[str]:
    """Returns the `n` texts of an embedding request."""
    return [request.prompt, *(f"{request.prompt} {index}" for index in range(1, request.n))]


def body_of(request: SimRequest) -> dict[str, Any]:
    optional = {
        "pooling": request.pooling or None,
        "priority": request.priority or None,
        "deadline_ms": request.deadline_ms,
        "cache_salt": request.cache_salt or None,
    }
    optional_fields = {name: value for name, value in optional.items() if value is not None}
    return {"model": request.model, "input": texts_of(request), "normalize": False} | optional_fields


class EmbeddingChecker(ReplyChecker):
    def __init__(self, request: SimRequest, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._request, self._prompts = request, prompts
        self._reply: dict[str, Any] = {}

    def take_whole(self, body: bytes) -> None:
        self._reply = msgspec.json.decode(body)

    def check_end(self) -> None:
        sampling = SamplingParams(seed=0, pooling="last" if self._request.pooling == "last" else "mean")
        expected_vectors = [array("f", expected_embedding(prompt, sampling)).tolist() for prompt in self._prompts]
        if [item["index"] for item in self._reply["data"]] != list(range(len(expected_vectors))):
            raise InvariantError(2, "not one vector for each text, in order")
        for index, (item, expected) in enumerate(zip(self._reply["data"], expected_vectors, strict=True)):
            if item["embedding"] != expected:
                raise InvariantError(2, f"text {index} gets {item['embedding']} instead of {expected}")
        self.num_tokens = sum(map(len, self._prompts))
        if self._reply["usage"]["prompt_tokens"] != self.num_tokens:
            raise InvariantError(2, f"the usage is {self._reply['usage']} instead of {self.num_tokens}")

"""The endpoints whose responses are made from embedding vectors: how each decodes its request and writes its response.

The vectors of all of them are computed in the same way, by `embeddings`.
"""

import base64
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol

import msgspec

from onward.api.requests.embedding_request import EmbeddingRequest, decode_embedding
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.similarity_request import RerankRequest, ScoreRequest, decode_rerank, decode_score
from onward.proto.router import Attempt
from onward.proto.sampling_params import Pooling

EMBEDDINGS_PATH, POOLING_PATH = "/v1/embeddings", "/pooling"
RERANK_PATHS, SCORE_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
"""The first of each is the path of the documentation; clients of vLLM and others use the other ones."""


class TextsRequest(Protocol):
    """A request with texts, of each of which a vector is made."""

    @property
    def model(self) -> str | None: ...
    @property
    def pooling(self) -> Pooling | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def deadline_ms(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    def inputs(self) -> list[str | list[int]]: ...
    def input_path(self, index: int) -> str: ...


@dataclass(frozen=True, slots=True)
class EmbeddingKind:
    decode: Callable[[bytes, ValidationContext, int], tuple[TextsRequest, tuple[str, ...]]]
    """Returns the request of a body, and the names of its unknown fields. The number is the length of vectors."""
    body: Callable[[Attempt, Any, int, Sequence[bytes]], bytes]
    """Returns the body of the response, from the request, its number of tokens and the vectors of its texts."""


def _embeddings_body(_: Attempt, request: EmbeddingRequest, num_tokens: int, vectors: Sequence[bytes]) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(_json_vectors(request, vectors))
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": request.model, "usage": _usage(num_tokens)})


def _pooling_body(attempt: Attempt, request: EmbeddingRequest, num_tokens: int, vectors: Sequence[bytes]) -> bytes:
    data = [
        {"object": "pooling", "index": index, "data": vector}
        for index, vector in enumerate(_json_vectors(request, vectors))
    ]
    fields = {"id": f"pool-{attempt.request_id}", "object": "list", "created": attempt.created_s, "data": data}
    return msgspec.json.encode(fields | {"model": request.model, "usage": _usage(num_tokens)})


def _json_vectors(request: EmbeddingRequest, vectors: Sequence[bytes]) -> list[str | list[float]]:
    """Returns the vectors in the form that the request asks for."""
    is_base64 = request.encoding_format == "base64"
    client_vectors = [_client_vector(vector, request.dimensions, request.normalize is not False) for vector in vectors]
    return [base64.b64encode(values.tobytes()).decode() if is_base64 else values.tolist() for values in client_vectors]


def _rerank_body(attempt: Attempt, request: RerankRequest, num_tokens: int, vectors: Sequence[bytes]) -> bytes:
    query, *documents = (_client_vector(vector, None, True) for vector in vectors)
    scores = [_cosine(query, document) for document in documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    texts, has_documents = request.texts(), request.return_documents is not False
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if has_documents else {})
        for index in order
    ]
    fields = {"id": f"rerank-{attempt.request_id}", "model": request.model, "results": results}
    return msgspec.json.encode(fields | {"usage": _usage(num_tokens)})


def _score_body(attempt: Attempt, request: ScoreRequest, num_tokens: int, vectors: Sequence[bytes]) -> bytes:
    units = [_client_vector(vector, None, True) for vector in vectors]
    data = [
        {"object": "score", "index": index, "score": _cosine(units[first], units[second])}
        for index, (first, second) in enumerate(request.pairs())
    ]
    fields = {"id": f"score-{attempt.request_id}", "object": "list", "created": attempt.created_s, "data": data}
    return msgspec.json.encode(fields | {"model": request.model, "usage": _usage(num_tokens)})


_RERANK = EmbeddingKind(lambda body, context, _: decode_rerank(body, context), _rerank_body)
_SCORE = EmbeddingKind(lambda body, context, _: decode_score(body, context), _score_body)
KINDS = {
    EMBEDDINGS_PATH: EmbeddingKind(decode_embedding, _embeddings_body),
    POOLING_PATH: EmbeddingKind(decode_embedding, _pooling_body),
    **dict.fromkeys(RERANK_PATHS, _RERANK),
    **dict.fromkeys(SCORE_PATHS, _SCORE),
}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _cosine(first: "array[float]", second: "array[float]") -> float:
    """Returns the cosine of the angle between two vectors of length 1, which are rounded to float32."""
    return max(min(math.fsum(map(mul, first, second)), 1.0), -1.0)


def _client_vector(vector: bytes, dimensions: int | None, is_normalized: bool) -> "array[float]":
    """Returns the vector as float32 in native byte order, cut to `dimensions` and normalized if requested. OpenAI's clients
    read base64 as little-endian, which is the byte order of all supported machines."""
    values = array("f", vector)[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / norm for value in values]) if is_normalized and norm else values

"""The requests of `/v1/rerank` and `/v1/score`, and every rule about their fields. An error names the path of the field."""

from typing import Any

import msgspec

from onward.api.requests.decoding import with_served_model
from onward.api.requests.embedding_request import MAX_INPUTS
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.unsupported_fields import check_embedding_field_names
from onward.api.requests.validation import check_number, check_prompt, check_ranges
from onward.proto.sampling_params import Pooling
from onward.web.json_body import decode, decode_fields, field_error


class _SimilarityFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Default: the model that is served, if it is the only one."""
    user: str | None = None
    pooling: Pooling | None = None
    """How a vector is made from the hidden states. Default: the server's `--pooling`."""
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None


class RerankRequest(_SimilarityFields, frozen=True, kw_only=True):
    query: str
    documents: list[Any]
    """Texts, or objects with a `text`."""
    top_n: int | None = None
    """Number of results that are returned. Default: all documents."""
    return_documents: bool | None = None
    """Whether a result has its document. Default: true."""

    def texts(self) -> list[str]:
        return [document["text"] if isinstance(document, dict) else document for document in self.documents]

    def inputs(self) -> list[str | list[int]]:
        """Returns the query and the documents."""
        return [self.query, *self.texts()]

    def input_path(self, index: int) -> str:
        return f"documents[{index - 1}]" if index else "query"


class ScoreRequest(_SimilarityFields, frozen=True, kw_only=True):
    text_1: str | list[str]
    """A text that is compared with each of `text_2`, or a list with one text for each of `text_2`."""
    text_2: str | list[str]

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of inputs that are compared."""
        num_first, num_second = len(_as_list(self.text_1)), len(_as_list(self.text_2))
        return [(0 if num_first == 1 else index, num_first + index) for index in range(num_second)]

    def inputs(self) -> list[str | list[int]]:
        return [*_as_list(self.text_1), *_as_list(self.text_2)]

    def input_path(self, index: int) -> str:
        num_first = len(_as_list(self.text_1))
        if index < num_first:
            return f"text_1[{index}]" if isinstance(self.text_1, list) else "text_1"
        return f"text_2[{index - num_first}]" if isinstance(self.text_2, list) else "text_2"


_reranks = msgspec.json.Decoder(RerankRequest)
_scores = msgspec.json.Decoder(ScoreRequest)


def decode_rerank(body: bytes, context: ValidationContext) -> tuple[RerankRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of its unknown fields."""
    unknown = check_embedding_field_names(decode_fields(body), body, RerankRequest.__struct_fields__)
    request = with_served_model(decode(body, _reranks), context)
    check_number("top_n", request.top_n, 1, MAX_INPUTS)
    check_ranges(request)
    _check_length("documents", len(request.documents))
    for index, document in enumerate(request.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            raise field_error(f"documents[{index}]", "must be a text, or an object with a text")
    _check_texts(request, context)
    return request, unknown


def decode_score(body: bytes, context: ValidationContext) -> tuple[ScoreRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of its unknown fields."""
    unknown = check_embedding_field_names(decode_fields(body), body, ScoreRequest.__struct_fields__)
    request = with_served_model(decode(body, _scores), context)
    check_ranges(request)
    num_first, num_second = len(_as_list(request.text_1)), len(_as_list(request.text_2))
    _check_length("text_1", num_first)
    _check_length("text_2", num_second)
    if num_first not in (1, num_second):
        raise field_error("text_1", f"must be one text, or as many as text_2, got {num_first} and {num_second}")
    _check_texts(request, context)
    return request, unknown


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _check_length(name: str, length: int) -> None:
    if not 1 <= length <= MAX_INPUTS:
        raise field_error(name, f"must have 1 to {MAX_INPUTS} texts, got {length}")


def _check_texts(request: RerankRequest | ScoreRequest, context: ValidationContext) -> None:
    for index, text in enumerate(request.inputs()):
        check_prompt(request.input_path(index), text, context)

"""The request of `/v1/embeddings`, and every rule about its fields. An error names the path of the field."""

from typing import Any, Literal

import msgspec

from onward.api.requests.decoding import with_served_model
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.unsupported_fields import check_embedding_field_names
from onward.api.requests.validation import check_number, check_prompt, check_ranges
from onward.proto.sampling_params import Pooling
from onward.web.json_body import decode, decode_fields, field_error

MAX_INPUTS = 2048
"""OpenAI's limit."""


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Default: the model that is served, if it is the only one."""
    input: str | list[Any] | None = None
    """A text, its token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """Length of the returned vectors: only this many of the first numbers of each vector are returned."""
    user: str | None = None
    pooling: Pooling | None = None
    """Extension: how a vector is made from the hidden states. Default: the server's `--pooling`."""
    normalize: bool | None = None
    """Extension: whether vectors are scaled to length 1, as OpenAI's are. Default: true."""
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None

    @property
    def lists_inputs(self) -> bool:
        return isinstance(self.input, list) and bool(self.input) and isinstance(self.input[0], (str, list))

    def inputs(self) -> list[str | list[int]]:
        return self.input if self.lists_inputs else [self.input]  # type: ignore[list-item, return-value]

    def input_path(self, index: int) -> str:
        return f"input[{index}]" if self.lists_inputs else "input"


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding(
    body: bytes, context: ValidationContext, hidden_size: int
) -> tuple[EmbeddingRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of its unknown fields."""
    unknown = check_embedding_field_names(decode_fields(body), body, EmbeddingRequest.__struct_fields__)
    request = with_served_model(decode(body, _decoder), context)
    check_number("dimensions", request.dimensions, 1, hidden_size)
    check_ranges(request)
    _check_inputs(request, context)
    return request, unknown


def _check_inputs(request: EmbeddingRequest, context: ValidationContext) -> None:
    if request.input is None:
        raise field_error("input", "is required")
    inputs = request.inputs()
    if len(inputs) > MAX_INPUTS:
        raise field_error("input", f"at most {MAX_INPUTS} inputs, got {len(inputs)}")
    for index, text_or_ids in enumerate(inputs):
        if type(text_or_ids) is not type(inputs[0]):
            raise field_error(request.input_path(index), "all inputs must be texts, or all token ids")
        check_prompt(request.input_path(index), text_or_ids, context)

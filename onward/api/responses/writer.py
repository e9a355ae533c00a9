"""Writes the answer to one request for a response: as a whole here, as a stream by `form`."""

from typing import Any

import msgspec

from onward.api.answer import Usage
from onward.api.dialect import Head, Opening
from onward.api.pieces import Piece
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.responses.request import ResponseRequest
from onward.api.responses.teller import Teller, UsageOf, new_teller
from onward.text.tool_calls.ids import IdStyle


class ResponseWriter:
    """Of a `Writer` it has what a whole answer needs; there are no chunks."""

    chunk_object = "response"
    adds_to_every_piece = False

    def __init__(self, prompts: Prompts, prepared: Prepared) -> None:
        assert isinstance(prepared.request, ResponseRequest)
        self._request = prepared.request
        self._request_id = prepared.attempt.request_id
        self._id_style: IdStyle = prompts.messages.id_style
        self._names = prompts.names

    def teller(self, head: Head, usage_of_tokens: UsageOf) -> Teller:
        return new_teller(head, self._request, self._request_id, self._id_style, self._names, usage_of_tokens)

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        teller = self.teller(head, lambda _: usage)
        teller.take(choices[0])
        teller.without_scores()
        if choices[0].finish_reason is None and choices[0].error is not None:
            teller.failed(choices[0].error)
        return msgspec.json.encode(teller.response())

    def opening(self, choice: int) -> Opening | None:
        return None

    def said(self, piece: Piece) -> bytes:
        raise AssertionError("a response has no chunks")

    def told_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    def logprobs(self, piece: Piece) -> Any:
        return None

    def inside(self, piece: Piece) -> dict[str, Any]:
        return {}

    def beside(self, piece: Piece) -> dict[str, Any]:
        return {}

"""`/v1/generate`: token ids in, token ids out. No template, and no tokenizer unless a stop string or bad word needs one.

With the internal adapter on, the token that ended the output is not shown, nor are its logprobs: those who speak tokens
to each other have no use for an eos. It is left out here and nowhere else: usage, cursors and history have it.
"""

from typing import Any, Literal

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import NoText, Piece, Text, Usage
from onward.api.dialect import Head
from onward.api.openai import Bounds, TokenRequest, decode_tokens
from onward.api.prompts import Prompts
from onward.proto.sampling import Sampling


class Generate:
    id_prefix = "gen-"
    prompt_param = "prompt_token_ids"
    chunk_object = "generate.chunk"
    prompt_logprobs_place: Literal["answer", "choice"] = "answer"

    def __init__(self, prompts: Prompts, internal_adapter: bool) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: Bounds) -> tuple[TokenRequest, int]:
        return decode_tokens(body, bounds)

    def prompt_token_ids(self, request: TokenRequest, created_s: int) -> list[int]:
        return request.prompt_token_ids

    def new_text(self, stop: list[str], sampling: Sampling) -> Text:
        return self._prompts.new_text(stop, sampling) if stop else NoText()

    def opening(self) -> bytes | None:
        return None

    def said(self, piece: Piece) -> bytes:
        return b'"token_ids":' + msgspec.json.encode(piece.token_ids[: self._num_shown(piece)])

    def logprobs(self, piece: Piece) -> list[Any]:
        shown = len(piece.rescored_token_ids) + self._num_shown(piece)
        return logprobs.of_tokens(piece.scored_token_ids[:shown], (piece.logprobs or [])[:shown])

    def prompt_logprobs(self, piece: Piece) -> list[Any]:
        return logprobs.of_prompt(piece.prompt_logprobs or [], None)

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("generate") | {"choices": listed, "usage": usage.as_json()} | beside
        if choices[0].prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs(choices[0])
        return msgspec.json.encode(fields)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "token_ids": piece.token_ids[: self._num_shown(piece)],
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
        } | continuing.of_choice(piece)

    def _num_shown(self, piece: Piece) -> int:
        return len(piece.token_ids) - (self._hides_end and piece.ended_by_token)

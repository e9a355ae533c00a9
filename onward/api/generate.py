"""`/v1/generate`: token ids in, token ids out. No template, and no tokenizer unless a stop string or bad word needs one.

With the internal adapter on, the token that ended the output is not shown (`pieces.shown_token_ids`), nor are its logprobs.
"""

from typing import Any

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Usage
from onward.api.dialect import Head, Opening
from onward.api.openai import decode_tokens
from onward.api.pieces import NoText, Piece, Text, shown_token_ids
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.requests import Bounds, TokenRequest
from onward.proto.sampling import Sampling


class Generate:
    id_prefix = "gen-"
    shows_text = False

    def __init__(self, prompts: Prompts, internal_adapter: bool) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: Bounds) -> tuple[TokenRequest, tuple[str, ...]]:
        return decode_tokens(body, bounds)

    def prompts(self, request: TokenRequest, created_s: int) -> list[list[int]]:
        return [request.prompt_token_ids]

    def prompt_path(self, request: TokenRequest, index: int) -> str:
        return "prompt_token_ids"

    def thinking(self, request: TokenRequest, prompts: list[list[int]], *, has_grammar: bool) -> None:
        return None

    def new_text(self, prepared: Prepared, sampling: Sampling) -> Text:
        stop = prepared.request.stop_strings()
        return self._prompts.new_text(stop, sampling) if stop else NoText()

    def writer(self, prepared: Prepared) -> "TokenWriter":
        return TokenWriter(self._hides_end)


class TokenWriter:
    chunk_object = "generate.chunk"
    adds_to_every_piece = False

    def __init__(self, hides_end: bool) -> None:
        self._hides_end = hides_end

    def opening(self, choice: int) -> Opening | None:
        return None

    def said(self, piece: Piece) -> bytes:
        return b'"token_ids":' + msgspec.json.encode(shown_token_ids(piece, hides_end=self._hides_end))

    def told_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    def logprobs(self, piece: Piece) -> list[Any]:
        shown = len(piece.rescored_token_ids) + len(shown_token_ids(piece, hides_end=self._hides_end))
        return logprobs.of_tokens(piece.scored_token_ids[:shown], (piece.logprobs or [])[:shown])

    def inside(self, piece: Piece) -> dict[str, Any]:
        return {}

    def beside(self, piece: Piece) -> dict[str, Any]:
        if piece.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(piece.prompt_logprobs, None)}

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("generate") | {"choices": listed, "usage": usage.as_json()} | beside
        return msgspec.json.encode(fields | self.beside(choices[0]))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "token_ids": shown_token_ids(piece, hides_end=self._hides_end),
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
        } | continuing.of_choice(piece)

"""`/v1/completions`: a prompt in, its continuation out."""

from typing import Any, Literal

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Piece, Text, Usage
from onward.api.dialect import Head
from onward.api.openai import Bounds, CompletionRequest, decode_completion
from onward.api.prompts import Prompts
from onward.proto.sampling import Sampling


class Completions:
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    chunk_object = "text_completion"
    prompt_logprobs_place: Literal["answer", "choice"] = "choice"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def decode(self, body: bytes, bounds: Bounds) -> tuple[CompletionRequest, int]:
        return decode_completion(body, bounds)

    def prompt_token_ids(self, request: CompletionRequest, created_s: int) -> list[int]:
        return self._prompts.of_completion(request, created_s)

    def new_text(self, stop: list[str], sampling: Sampling) -> Text:
        return self._prompts.new_text(stop, sampling)

    def opening(self) -> bytes | None:
        return None

    def said(self, piece: Piece) -> bytes:
        return b'"text":' + msgspec.json.encode(piece.text)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return logprobs.of_completion(
            self._prompts.names, piece.scored_token_ids, piece.logprobs or [], piece.text_offsets or []
        )

    def prompt_logprobs(self, piece: Piece) -> list[Any]:
        return logprobs.of_prompt(piece.prompt_logprobs or [], self._prompts.names)

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        if choices[0].prompt_logprobs is not None:
            # The choices have one prompt, and the first has looked at it for all.
            shared = self.prompt_logprobs(choices[0])
            listed = [choice | {"prompt_logprobs": shared} for choice in listed]
        fields = head.fields("text_completion") | {"choices": listed, "usage": usage.as_json()} | beside
        return msgspec.json.encode(fields)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
        } | continuing.of_choice(piece)

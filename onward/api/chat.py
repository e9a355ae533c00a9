"""`/v1/chat/completions`: messages in, an assistant's message out."""

from typing import Any, Literal

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Piece, Text, Usage
from onward.api.dialect import Head
from onward.api.openai import Bounds, ChatRequest, decode_chat
from onward.api.prompts import Prompts
from onward.proto.sampling import Sampling


class Chat:
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    chunk_object = "chat.completion.chunk"
    prompt_logprobs_place: Literal["answer", "choice"] = "answer"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def decode(self, body: bytes, bounds: Bounds) -> tuple[ChatRequest, int]:
        return decode_chat(body, bounds)

    def prompt_token_ids(self, request: ChatRequest, created_s: int) -> list[int]:
        return self._prompts.of_chat(request, created_s)

    def new_text(self, stop: list[str], sampling: Sampling) -> Text:
        return self._prompts.new_text(stop, sampling)

    def opening(self) -> bytes | None:
        return b'"delta":{"role":"assistant","content":""}'

    def said(self, piece: Piece) -> bytes:
        if not piece.text and piece.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(piece.text)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return logprobs.of_chat(self._prompts.names, piece.scored_token_ids, piece.logprobs or [])

    def prompt_logprobs(self, piece: Piece) -> list[Any]:
        return logprobs.of_prompt(piece.prompt_logprobs or [], self._prompts.names)

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("chat.completion") | {"choices": listed, "usage": usage.as_json()} | beside
        if choices[0].prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs(choices[0])
        return msgspec.json.encode(fields)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
        } | continuing.of_choice(piece)

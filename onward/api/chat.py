"""`/v1/chat/completions`: messages in, an assistant's message out."""

from typing import Any

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Usage
from onward.api.dialect import Head, Opening
from onward.api.openai import decode_chat
from onward.api.pieces import Piece, Text
from onward.api.prompts import Prompts
from onward.api.requests import Bounds, ChatRequest
from onward.proto.sampling import Sampling


class Chat:
    id_prefix = "chatcmpl-"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def decode(self, body: bytes, bounds: Bounds) -> tuple[ChatRequest, int]:
        return decode_chat(body, bounds)

    def prompts(self, request: ChatRequest, created_s: int) -> list[list[int]]:
        return [self._prompts.of_chat(request, created_s)]

    def prompt_path(self, request: ChatRequest, index: int) -> str:
        return "messages" if request.prompt_token_ids is None else "prompt_token_ids"

    def new_text(self, request: ChatRequest, sampling: Sampling) -> Text:
        return self._prompts.new_text(request.stop_strings(), sampling, bool(request.include_stop_str_in_output))

    def writer(self, request: ChatRequest, prompts: list[list[int]]) -> "ChatWriter":
        return ChatWriter(self._prompts, request, prompts[0])


class ChatWriter:
    chunk_object = "chat.completion.chunk"

    def __init__(self, prompts: Prompts, request: ChatRequest, prompt_token_ids: list[int]) -> None:
        self._names = prompts.names
        self.adds_to_every_piece = bool(request.return_token_ids)
        self._told_prompt = {"prompt_token_ids": prompt_token_ids} if request.return_token_ids else {}

    def opening(self, choice: int) -> Opening:
        beside = self._told_prompt if choice == 0 else {}
        return Opening(b'"delta":{"role":"assistant","content":""}', beside=beside)

    def said(self, piece: Piece) -> bytes:
        if not piece.text and piece.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(piece.text)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return logprobs.of_chat(self._names, piece.scored_token_ids, piece.logprobs or [])

    def inside(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.token_ids} if self.adds_to_every_piece else {}

    def beside(self, piece: Piece) -> dict[str, Any]:
        if piece.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(piece.prompt_logprobs, self._names)}

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("chat.completion") | {"choices": listed, "usage": usage.as_json()}
        return msgspec.json.encode(fields | beside | self._told_prompt | self.beside(choices[0]))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self.inside(piece),
            **continuing.of_choice(piece),
        }

"""`/v1/chat/completions`: messages in, an assistant's message out."""

from typing import Any

import msgspec

from onward.api.answer import Usage
from onward.api.dialect import Head, Said
from onward.api.openai import Bounds, ChatRequest, decode_chat
from onward.api.prompts import Prompts


class Chat:
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    chunk_object = "chat.completion.chunk"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def decode(self, body: bytes, bounds: Bounds) -> tuple[ChatRequest, int]:
        return decode_chat(body, bounds)

    def prompt_token_ids(self, request: ChatRequest, created_s: int) -> list[int]:
        return self._prompts.of_chat(request, created_s)

    def opening(self) -> bytes | None:
        return b'"delta":{"role":"assistant","content":""}'

    def said(self, text: str, finish_reason: str | None) -> bytes:
        if not text and finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(text)

    def whole(self, head: Head, choices: list[Said], usage: Usage) -> bytes:
        listed = [_choice(one) for one in choices]
        fields = head.fields("chat.completion") | {"choices": listed, "usage": usage.as_json()}
        return msgspec.json.encode(fields)


def _choice(said: Said) -> dict[str, Any]:
    message = {"role": "assistant", "content": said.text, "refusal": None}
    return {"index": said.index, "message": message, "logprobs": None, "finish_reason": said.finish_reason}

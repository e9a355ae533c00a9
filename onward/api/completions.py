"""`/v1/completions`: a prompt in, its continuation out."""

import msgspec

from onward.api.answer import Usage
from onward.api.dialect import Head, Said
from onward.api.openai import Bounds, CompletionRequest, decode_completion
from onward.api.prompts import Prompts


class Completions:
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    chunk_object = "text_completion"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def decode(self, body: bytes, bounds: Bounds) -> tuple[CompletionRequest, int]:
        return decode_completion(body, bounds)

    def prompt_token_ids(self, request: CompletionRequest, created_s: int) -> list[int]:
        return self._prompts.of_completion(request, created_s)

    def opening(self) -> bytes | None:
        return None

    def said(self, text: str, finish_reason: str | None) -> bytes:
        return b'"text":' + msgspec.json.encode(text)

    def whole(self, head: Head, choices: list[Said], usage: Usage) -> bytes:
        listed = [
            {"index": one.index, "text": one.text, "logprobs": None, "finish_reason": one.finish_reason}
            for one in choices
        ]
        fields = head.fields("text_completion") | {"choices": listed, "usage": usage.as_json()}
        return msgspec.json.encode(fields)

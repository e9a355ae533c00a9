"""Everything about text that needs the model's files: prompts in, text streams out. Runs in a thread; knows no HTTP."""

from pathlib import Path
from typing import Any

import msgspec

from onward.api.body import wrong
from onward.api.logprobs import TextOffsets, TokenNames
from onward.api.openai import ChatRequest, CompletionRequest
from onward.errors import InvalidRequest
from onward.proto.model import PreparedModel
from onward.proto.sampling import Sampling
from onward.text.bad_words import bad_word_token_ids
from onward.text.chat_template import ChatTemplate
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from onward.text.tokenizer import Tokenizer


class Prompts:
    def __init__(self, model: PreparedModel) -> None:
        self._tokenizer = Tokenizer.from_file(Path(model.folder) / model.tokenizer) if model.tokenizer else None
        self._template = (
            ChatTemplate(model.chat_template, model.bos_token, model.eos_token) if model.chat_template else None
        )
        self._table = self._tokenizer.table if self._tokenizer else TokenTable([])
        self.names = TokenNames(self._table)

    def of_chat(self, request: ChatRequest, created_s: int) -> list[int]:
        if self._template is None or self._tokenizer is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        messages = [_plain(message) for message in request.messages]
        return self._tokenizer.encode_chat(self._template.render(messages, created_s=created_s))

    def of_completion(self, request: CompletionRequest, created_s: int) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        if self._tokenizer is None:
            raise wrong("prompt", "this model has no tokenizer; send token ids")
        token_ids = self._tokenizer.encode(request.prompt)
        if not token_ids:
            raise wrong("prompt", "must not be empty")
        return token_ids

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        return bad_word_token_ids(words, self._tokenizer)

    def new_offsets(self) -> TextOffsets:
        return TextOffsets(self._table)

    def new_text(self, stop: list[str], sampling: Sampling) -> TextStream:
        if stop and self._tokenizer is None:
            raise wrong("stop", "this model has no tokenizer, so there is no text to find it in; use stop_token_ids")
        return TextStream(
            self._table,
            tuple(stop),
            end_token_ids=sampling.end_token_ids,
            min_tokens=sampling.min_tokens,
        )


def _plain(message: msgspec.Struct) -> dict[str, Any]:
    """Templates test for a field by its presence, so what was not sent is not there."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}

"""`/v1/chat/completions`: messages in, an assistant's message out."""

from typing import Any

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Usage
from onward.api.dialect import Head, Opening
from onward.api.message_json import CallId, delta_fields, message_fields
from onward.api.openai import decode_chat
from onward.api.pieces import Piece, Text, shown_token_ids
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.requests import Bounds, ChatRequest
from onward.api.thinking import rule_of
from onward.proto.sampling import Sampling
from onward.proto.thinking import ThinkingRule
from onward.text.message_text import MessageText
from onward.text.tool_calls.ids import IdStyle, tool_call_id


class Chat:
    id_prefix = "chatcmpl-"
    shows_text = True

    def __init__(self, prompts: Prompts, internal_adapter: bool = False) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: Bounds) -> tuple[ChatRequest, tuple[str, ...]]:
        return decode_chat(body, bounds)

    def prompts(self, request: ChatRequest, created_s: int) -> list[list[int]]:
        return [self._prompts.of_chat(request, created_s)]

    def prompt_path(self, request: ChatRequest, index: int) -> str:
        return "messages" if request.prompt_token_ids is None else "prompt_token_ids"

    def thinking(self, request: ChatRequest, prompts: list[list[int]], *, has_grammar: bool) -> ThinkingRule | None:
        return rule_of(
            self._prompts.messages.reasoning,
            self._prompts.tokens.tokenizer,
            prompts[0],
            request.thinking_budget,
            has_grammar=has_grammar,
            goes_on=bool(request.continue_final_message),
        )

    def new_text(self, prepared: Prepared, sampling: Sampling) -> Text:
        request = prepared.request
        assert isinstance(request, ChatRequest)
        take_apart = self._prompts.messages.new_stream(prepared)
        shows_stop = bool(request.include_stop_str_in_output)
        if take_apart is None:
            return self._prompts.new_text(request.stop_strings(), sampling, shows_stop)
        return MessageText(self._prompts.new_marked_text(request.stop_strings(), sampling, shows_stop), take_apart)

    def writer(self, prepared: Prepared) -> "ChatWriter":
        return ChatWriter(self._prompts, prepared, self._hides_end)


class ChatWriter:
    chunk_object = "chat.completion.chunk"

    def __init__(self, prompts: Prompts, prepared: Prepared, hides_end: bool) -> None:
        request = prepared.request
        assert isinstance(request, ChatRequest)
        self._names = prompts.names
        self._hides_end = hides_end
        self._plan = prepared.plan
        self._request_id = prepared.attempt.request_id
        self._id_style: IdStyle = prompts.messages.id_style
        self.adds_to_every_piece = bool(request.return_token_ids)
        self._told_prompt = {"prompt_token_ids": prepared.prompts[0]} if request.return_token_ids else {}

    def opening(self, choice: int) -> Opening:
        beside = self._told_prompt if choice == 0 else {}
        # An answer that only calls has no content, not an empty one.
        content = b'""' if self._plan.mode == "none" else b"null"
        return Opening(b'"delta":{"role":"assistant","content":%b}' % content, beside=beside)

    def told_reason(self, piece: Piece) -> str | None:
        return self._plan.told_reason(piece.finish_reason, piece.has_calls)

    def said(self, piece: Piece) -> bytes:
        if piece.events is not None:
            return b'"delta":' + msgspec.json.encode(delta_fields(piece.events, self._call_ids(piece)))
        if not piece.text and piece.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(piece.text)

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return logprobs.of_chat(self._names, piece.scored_token_ids, piece.logprobs or [])

    def inside(self, piece: Piece) -> dict[str, Any]:
        if not self.adds_to_every_piece:
            return {}
        return {"token_ids": shown_token_ids(piece, hides_end=self._hides_end)}

    def beside(self, piece: Piece) -> dict[str, Any]:
        if piece.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(piece.prompt_logprobs, self._names)}

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("chat.completion") | {"choices": listed, "usage": usage.as_json()}
        return msgspec.json.encode(fields | beside | self._told_prompt | self.beside(choices[0]))

    def _call_ids(self, piece: Piece) -> CallId:
        return lambda index: tool_call_id(self._request_id, piece.choice, index, self._id_style)

    def _message(self, piece: Piece) -> dict[str, Any]:
        if piece.events is None:
            return {"role": "assistant", "content": piece.text, "refusal": None}
        return message_fields(piece.events, self._call_ids(piece))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": self._message(piece),
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": self.told_reason(piece),
            **self.inside(piece),
            **continuing.of_choice(piece),
        }

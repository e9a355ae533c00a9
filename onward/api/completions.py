"""`/v1/completions`: prompts in, their continuations out.

With `echo` a choice's text begins with its prompt: in a stream with what the choice is opened by, and with logprobs where
those of the prompt are told. A client that brings tokens of an earlier answer (`generated_token_ids`) has the prompt.
"""

from typing import Any

import msgspec

from onward.api import continuing, logprobs
from onward.api.answer import Usage
from onward.api.dialect import Head, Opening
from onward.api.logprobs import TextOffsets
from onward.api.openai import decode_completion
from onward.api.pieces import Piece, Text, shown_token_ids
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.requests import Bounds, CompletionRequest
from onward.proto.sampling import Sampling


class Completions:
    id_prefix = "cmpl-"
    shows_text = True

    def __init__(self, prompts: Prompts, internal_adapter: bool = False) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: Bounds) -> tuple[CompletionRequest, tuple[str, ...]]:
        return decode_completion(body, bounds)

    def prompts(self, request: CompletionRequest, created_s: int) -> list[list[int]]:
        return self._prompts.of_completion(request)

    def prompt_path(self, request: CompletionRequest, index: int) -> str:
        return request.prompt_path(index)

    def thinking(self, request: CompletionRequest, prompts: list[list[int]], *, has_grammar: bool) -> None:
        return None

    def new_text(self, prepared: Prepared, sampling: Sampling) -> Text:
        request = prepared.request
        assert isinstance(request, CompletionRequest)
        return self._prompts.new_text(request.stop_strings(), sampling, bool(request.include_stop_str_in_output))

    def writer(self, prepared: Prepared) -> "CompletionWriter":
        assert isinstance(prepared.request, CompletionRequest)
        return CompletionWriter(self._prompts, prepared.request, prepared.prompts, self._hides_end)


class CompletionWriter:
    chunk_object = "text_completion"

    def __init__(
        self, prompts: Prompts, request: CompletionRequest, prompt_ids: list[list[int]], hides_end: bool
    ) -> None:
        self._prompts = prompts
        self._hides_end = hides_end
        self._prompt_ids = prompt_ids
        self._num_told = request.num_told
        self._echoes_scores = request.echoes_scores
        self._opens_by_prompt = bool(request.echo) and not request.echoes_scores and request.resumed_tokens is None
        self._echoed = self._prompt_texts(request) if request.echo else [""] * len(prompt_ids)
        self.adds_to_every_piece = bool(request.return_token_ids)

    def _prompt_texts(self, request: CompletionRequest) -> list[str]:
        given = request.prompts()
        return [one if isinstance(one, str) else self._prompts.text_of(one, with_special=True) for one in given]

    def opening(self, choice: int) -> Opening | None:
        if not (self._opens_by_prompt or self.adds_to_every_piece):
            return None
        text = self._echoed[self._place(choice)] if self._opens_by_prompt else ""
        return Opening(b'"text":' + msgspec.json.encode(text), inside=self._told_prompt(choice))

    def said(self, piece: Piece) -> bytes:
        return b'"text":' + msgspec.json.encode(self._scored_echo(piece) + piece.text)

    def told_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        place, names = self._place(piece.choice), self._prompts.names
        offsets = [len(self._echoed[place]) + offset for offset in piece.text_offsets or []]
        told = logprobs.of_completion(names, piece.scored_token_ids, piece.logprobs or [], offsets)
        if not self._echoes_scores or piece.prompt_logprobs is None:
            return told
        before = logprobs.of_echo(names, self._prompt_ids[place], piece.prompt_logprobs, self._prompt_offsets(place))
        return {name: before[name] + listed for name, listed in told.items()}

    def _prompt_offsets(self, place: int) -> TextOffsets:
        """Special tokens that the tokenizer has added to a string are not part of it; those that were given are."""
        prompt_ids = self._prompt_ids[place]
        is_whole = self._prompts.text_of(prompt_ids, with_special=True) == self._echoed[place]
        return self._prompts.new_offsets(with_special=is_whole)

    def inside(self, piece: Piece) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if piece.prompt_logprobs is not None and not self._echoes_scores:
            fields["prompt_logprobs"] = logprobs.of_prompt(piece.prompt_logprobs, self._prompts.names)
        if self.adds_to_every_piece:
            fields["token_ids"] = shown_token_ids(piece, hides_end=self._hides_end)
        return fields

    def beside(self, piece: Piece) -> dict[str, Any]:
        return {}

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("text_completion") | {"choices": listed, "usage": usage.as_json()} | beside
        return msgspec.json.encode(fields)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        opened_by = self._echoed[self._place(piece.choice)] if self._opens_by_prompt else ""
        return {
            "index": piece.choice,
            "text": opened_by + self._scored_echo(piece) + piece.text,
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self._told_prompt(piece.choice),
            **self.inside(piece),
            **continuing.of_choice(piece),
        }

    def _place(self, choice: int) -> int:
        """Whose prompt it is."""
        return choice // self._num_told

    def _told_prompt(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids[self._place(choice)]} if self.adds_to_every_piece else {}

    def _scored_echo(self, piece: Piece) -> str:
        is_told = self._echoes_scores and piece.prompt_logprobs is not None
        return self._echoed[self._place(piece.choice)] if is_told else ""

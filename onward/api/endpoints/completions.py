"""`/v1/completions`: prompts in, their continuations out.

With `echo` a choice's text begins with its prompt: in a stream with what the choice is opened by, and with logprobs where
those of the prompt are told. A client that brings tokens of an earlier answer (`generated_token_ids`) has the prompt.
"""

from typing import Any

import msgspec

from onward.api.lifecycle import logprobs_json, resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream, shown_token_ids
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OpeningChunk
from onward.api.lifecycle.logprobs_json import TextOffsets
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.decoding import decode_completion
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import CompletionRequest, ValidationContext
from onward.api.requests.text_processor import TextProcessor
from onward.proto.sampling_params import SamplingParams


class CompletionsAdapter:
    id_prefix = "cmpl-"
    returns_text = True

    def __init__(self, prompts: TextProcessor, internal_adapter: bool = False) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: ValidationContext) -> tuple[CompletionRequest, tuple[str, ...]]:
        return decode_completion(body, bounds)

    def tokenize_prompts(self, request: CompletionRequest, created_s: int) -> list[list[int]]:
        return self._prompts.tokenize_completion(request)

    def prompt_path(self, request: CompletionRequest, index: int) -> str:
        return request.prompt_path(index)

    def reasoning_params(self, request: CompletionRequest, prompts: list[list[int]], *, has_grammar: bool) -> None:
        return None

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        request = prepared.request
        assert isinstance(request, CompletionRequest)
        return self._prompts.new_text_stream(request.stop_strings(), sampling, bool(request.include_stop_str_in_output))

    def json_writer(self, prepared: PreparedRequest) -> "CompletionJsonWriter":
        assert isinstance(prepared.request, CompletionRequest)
        return CompletionJsonWriter(self._prompts, prepared.request, prepared.prompt_token_ids, self._hides_end)


class CompletionJsonWriter:
    chunk_object = "text_completion"

    def __init__(
        self, prompts: TextProcessor, request: CompletionRequest, prompt_ids: list[list[int]], hides_end: bool
    ) -> None:
        self._prompts = prompts
        self._hides_end = hides_end
        self._prompt_ids = prompt_ids
        self._num_told = request.num_returned
        self._echoes_scores = request.echoes_prompt_logprobs
        self._opens_by_prompt = (
            bool(request.echo) and not request.echoes_prompt_logprobs and request.resumed_tokens is None
        )
        self._echoed = self._prompt_texts(request) if request.echo else [""] * len(prompt_ids)
        self.has_extra_choice_fields = bool(request.return_token_ids)

    def _prompt_texts(self, request: CompletionRequest) -> list[str]:
        given = request.prompts()
        return [one if isinstance(one, str) else self._prompts.decode(one, with_special=True) for one in given]

    def opening_chunk(self, choice: int) -> OpeningChunk | None:
        if not (self._opens_by_prompt or self.has_extra_choice_fields):
            return None
        text = self._echoed[self._place(choice)] if self._opens_by_prompt else ""
        return OpeningChunk(b'"text":' + msgspec.json.encode(text), extra_choice_fields=self._told_prompt(choice))

    def content_json(self, piece: ChoiceUpdate) -> bytes:
        return b'"text":' + msgspec.json.encode(self._scored_echo(piece) + piece.text)

    def client_finish_reason(self, piece: ChoiceUpdate) -> str | None:
        return piece.finish_reason

    def logprobs(self, piece: ChoiceUpdate) -> dict[str, Any]:
        place, names = self._place(piece.choice_index), self._prompts.token_strings
        offsets = [len(self._echoed[place]) + offset for offset in piece.text_offsets or []]
        told = logprobs_json.completion_logprobs(names, piece.scored_token_ids, piece.logprobs or [], offsets)
        if not self._echoes_scores or piece.prompt_logprobs is None:
            return told
        before = logprobs_json.echoed_prompt_logprobs(
            names, self._prompt_ids[place], piece.prompt_logprobs, self._prompt_offsets(place)
        )
        return {name: before[name] + listed for name, listed in told.items()}

    def _prompt_offsets(self, place: int) -> TextOffsets:
        """Special tokens that the tokenizer has added to a string are not part of it; those that were given are."""
        prompt_ids = self._prompt_ids[place]
        is_whole = self._prompts.decode(prompt_ids, with_special=True) == self._echoed[place]
        return self._prompts.new_text_offsets(with_special=is_whole)

    def extra_choice_fields(self, piece: ChoiceUpdate) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if piece.prompt_logprobs is not None and not self._echoes_scores:
            fields["prompt_logprobs"] = logprobs_json.prompt_logprobs(
                piece.prompt_logprobs, self._prompts.token_strings
            )
        if self.has_extra_choice_fields:
            fields["token_ids"] = shown_token_ids(piece, hides_end=self._hides_end)
        return fields

    def extra_top_level_fields(self, piece: ChoiceUpdate) -> dict[str, Any]:
        return {}

    def whole_body(
        self, head: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, beside: dict[str, Any]
    ) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("text_completion") | {"choices": listed, "usage": usage.as_json()} | beside
        return msgspec.json.encode(fields)

    def _choice(self, piece: ChoiceUpdate) -> dict[str, Any]:
        opened_by = self._echoed[self._place(piece.choice_index)] if self._opens_by_prompt else ""
        return {
            "index": piece.choice_index,
            "text": opened_by + self._scored_echo(piece) + piece.text,
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self._told_prompt(piece.choice_index),
            **self.extra_choice_fields(piece),
            **resume_fields.choice_resume_fields(piece),
        }

    def _place(self, choice: int) -> int:
        """Whose prompt it is."""
        return choice // self._num_told

    def _told_prompt(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids[self._place(choice)]} if self.has_extra_choice_fields else {}

    def _scored_echo(self, piece: ChoiceUpdate) -> str:
        is_told = self._echoes_scores and piece.prompt_logprobs is not None
        return self._echoed[self._place(piece.choice_index)] if is_told else ""

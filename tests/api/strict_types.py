"""Holds answers against the openai package's own types, strictly: every value of the right type, and no field that they do
not have but for those that are ours.

The package's types are laxer than what a server may send, and in two places stricter than what OpenAI's own sends: the
choices of a completion's chunks have no `finish_reason` before the end, and the first token of an echoed prompt has no
logprob. Those two are filled in here before the look."""

import json
from typing import Any

from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

RESCHEDULE = "pd_reschedule"
"""The one finish reason that is ours."""
OURS = frozenset(
    {
        "completion_token_ids",
        "num_text_tokens",
        "error",
        "seed",
        "resume",
        "prompt_logprobs",
        "token_ids",
        "prompt_token_ids",
        "reasoning_content",
        "max_model_len",
        "meta",
        "root",
        "stop_reason",
        "matched_stop",
        RESCHEDULE,
    }
)
"""What stands beside OpenAI's fields: to continue an answer elsewhere, what clients of vLLM ask for, and thinking."""
ERROR_FIELDS = frozenset({"retryable", "stage", "retry_after_s"})
"""Fields of errors beside OpenAI's."""
KINDS: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": Completion,
    "list": CreateEmbeddingResponse,
    "model": Model,
}


def check_answer(data: dict[str, Any], ours: frozenset[str] = frozenset()) -> BaseModel:
    """`ours`: the fields of `OURS` that the request has asked for."""
    assert ours <= OURS
    fields = json.loads(json.dumps(data))
    for choice in fields.get("choices", []):
        if choice.get("finish_reason") == RESCHEDULE and RESCHEDULE in ours:
            choice["finish_reason"] = "stop"
    if data["object"] == "text_completion":
        for choice in fields["choices"]:
            _fill_in(choice)
    read = KINDS[data["object"]].model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) <= ours
    return read


def check_events(text: str, ours: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    *events, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.partition("data: ")[2]) for event in events]
    for chunk in chunks:
        check_answer(chunk, ours)
    return chunks


def extras(value: Any) -> set[str]:
    """Fields that the types do not have, wherever they stand."""
    if isinstance(value, BaseModel):
        inner = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or {}).union(*map(extras, inner))
    if isinstance(value, list):
        return set().union(*map(extras, value))
    return set()


def _fill_in(choice: dict[str, Any]) -> None:
    choice["finish_reason"] = choice["finish_reason"] or "stop"
    if choice["logprobs"] is not None and choice["logprobs"]["token_logprobs"][:1] == [None]:
        choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}


def check_error(body: dict[str, Any]) -> ErrorObject:
    """The error of a refusal or of a failed answer, without the documented fields beside OpenAI's."""
    assert body.keys() <= {"error", "partial"}, body
    read = ErrorObject.model_validate_json(json.dumps(body["error"]), strict=True)
    assert extras(read) <= ERROR_FIELDS, body
    return read

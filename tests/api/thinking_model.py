"""An api process for a model that calls tools and thinks aloud, and what such a model says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.small_model import EOS

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
SECOND_CALL = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
FORCED_CALL = '{"name": "f", "parameters": {"a": 1}}'
"""As the grammar of an answer that must call has it."""


def prepare(folder: Path) -> PreparedModel:
    return small_model.prepare(
        folder, max_model_len=1024, template=small_model.THINKING_TEMPLATE, tags=("<think>", "</think>")
    )


@contextmanager
def thinking_instance(model: PreparedModel, config: ApiConfig | None = None) -> Iterator[Instance]:
    with running(model, config) as instance:
        yield instance


def tokens_of(*parts: str | int) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]


def speak(instance: Instance, *outputs: Sequence[int]) -> None:
    """Each choice says its own, as far as its budget lets it; behind it the end token, or nothing if a grammar is done."""

    def choose(prompt: Sequence[int], sampling: SamplingParams, tokens: Sequence[int]) -> int:
        forced = None if sampling.reasoning is None else ReasoningTracker(sampling.reasoning, tokens).forced_token_id
        output = outputs[sampling.choice_index]
        return forced if forced is not None else output[len(tokens)] if len(tokens) < len(output) else EOS

    def is_complete(sampling: SamplingParams, tokens: Sequence[int]) -> bool:
        return sampling.grammar is not None and len(tokens) == len(outputs[sampling.choice_index])

    instance.engine.choose, instance.engine.is_complete = choose, is_complete

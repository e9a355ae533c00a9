"""The items of a response's output: words, thoughts and calls, each while it grows and when it is done.

The id of an item is a function of the request and of the item's place.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class MessageItem:
    id: str
    index: int
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_logprobs: bool = False

    delta, done = "response.output_text.delta", "response.output_text.done"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"type": "output_text", "text": self.text, "annotations": []}
        return fields | {"logprobs": list(self.logprobs)} if self.has_logprobs else fields

    def as_json(self) -> dict[str, Any]:
        """Empty as long as there is nothing in it."""
        has_part = bool(self.texts) or self.status != "in_progress"
        content = [self.part()] if has_part else []
        return {"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content}


@dataclass(slots=True)
class ReasoningItem:
    id: str
    index: int
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)

    delta, done = "response.reasoning_text.delta", "response.reasoning_text.done"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def as_json(self) -> dict[str, Any]:
        content = [self.part()] if self.texts else []
        return {"type": "reasoning", "id": self.id, "status": self.status, "summary": [], "content": content}


@dataclass(slots=True)
class FunctionCallItem:
    id: str
    index: int
    call_id: str
    name: str
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The JSON text of its arguments."""
        return "".join(self.texts)

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }


TextItem = MessageItem | ReasoningItem
OutputItem = TextItem | FunctionCallItem

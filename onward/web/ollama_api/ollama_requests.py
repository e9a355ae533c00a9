"""The request bodies of Ollama's API. Fields that the conversion passes on are checked by the endpoint that gets them."""

from typing import Any

import msgspec

KeepAlive = str | int | float


class OllamaFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A call of an earlier answer, which the client sends back."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str | None = None
    images: list[Any] | None = None
    """Refused unless it is empty: this server reads text only."""
    thinking: str | None = None
    """The assistant's thinking before this message."""
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    """In a message of the role `tool`: the function whose result it is."""
    tool_call_id: str | None = None
    """In a message of the role `tool`: the id of the call. Default: the first call of `tool_name` without a result."""


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """A served model. `:latest` at the end of the name may be left out or added."""


class OllamaGenerationFields(OllamaModelRequest, frozen=True, kw_only=True):
    stream: bool | None = None
    """Whether the answer is a stream of JSON lines. Default: true."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema that the answer follows."""
    options: dict[str, Any] | None = None
    """How tokens are sampled, and where the answer ends."""
    think: bool | str | None = None
    """Whether the model thinks first: true, false, `low`, `medium` or `high`. Default: as the model's template has it."""
    keep_alive: KeepAlive | None = None
    """No effect: the model stays loaded."""
    truncate: bool | None = None
    """No effect: a prompt that is too long is refused."""
    shift: bool | None = None
    """Only false: an answer ends where the context does."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    priority: int | None = None
    """Extension: as in chats."""
    deadline_ms: int | None = None
    """Extension: as in chats."""
    cache_salt: str | None = None
    """Extension: as in chats."""


class OllamaChatRequest(OllamaGenerationFields, frozen=True, kw_only=True):
    messages: list[OllamaMessage] | None = None
    """Without messages nothing is generated, and the answer says that the model is loaded."""
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaGenerationFields, frozen=True, kw_only=True):
    prompt: str | None = None
    """Without a prompt nothing is generated, and the answer says that the model is loaded."""
    system: str | None = None
    """The system message before the prompt."""
    raw: bool | None = None
    """Whether the prompt is continued as it is, without the model's template."""
    suffix: str | None = None
    """Refused unless it is empty."""
    template: str | None = None
    """Refused unless it is empty."""
    context: list[int] | None = None
    """Refused unless it is empty: `/api/chat` takes earlier messages."""
    images: list[Any] | None = None
    """Refused unless it is empty: this server reads text only."""


class OllamaEmbedRequest(OllamaModelRequest, frozen=True, kw_only=True):
    input: str | list[str] | None = None
    """A text, or a list of texts."""
    dimensions: int | None = None
    """Length of the returned vectors."""
    truncate: bool | None = None
    """No effect: a text that is too long is refused."""
    options: dict[str, Any] | None = None
    """No effect on a vector."""
    keep_alive: KeepAlive | None = None
    """No effect: the model stays loaded."""
    priority: int | None = None
    """Extension: as in chats."""
    deadline_ms: int | None = None
    """Extension: as in chats."""
    cache_salt: str | None = None
    """Extension: as in chats."""


class OllamaShowRequest(OllamaModelRequest, frozen=True, kw_only=True):
    verbose: bool | None = None
    """No effect: the vocabulary is never returned."""

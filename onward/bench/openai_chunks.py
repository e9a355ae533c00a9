"""Reads text, token counts and errors from OpenAI's answers, for benchmarks and the chat command. Ignores all else."""

from typing import Any

import msgspec

from onward.errors import ServerError


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: Any = None
    """The model's thinking; `reasoning` on some servers. Only whether there is any is used."""
    reasoning: Any = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta | None = None
    """Set in chunks of chat completions."""
    text: str | None = None
    """Set in chunks of completions."""
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class Chunk(msgspec.Struct, frozen=True):
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        return "".join((c.delta.content if c.delta else c.text) or "" for c in self.choices)

    @property
    def has_output(self) -> bool:
        """Whether the model wrote something: text of the answer or of its reasoning."""
        return bool(self.text) or any(
            c.delta.reasoning_content or c.delta.reasoning for c in self.choices if c.delta is not None
        )


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Returns a chunk. Raises `ServerError` for an error that the server sent in its place, or an invalid event."""
    try:
        chunk = _decoder.decode(data)
    except msgspec.DecodeError as fault:
        raise ServerError(f"the server sent an event that is not a chunk: {fault}") from None
    if chunk.error is not None:
        raise ServerError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """Returns the message of an error answer, in OpenAI's form or any other."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError, IndexError):
        return body[:200].decode(errors="replace").strip() or "no reason was given"

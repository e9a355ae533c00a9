"""Encodes the JSON of a stream's chunks. It runs for every token, so the parts that do not change are encoded once."""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.api.lifecycle import resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.request_output import TokenUsage

_encode = msgspec.json.encode


class ChunkEncoder:
    def __init__(self, writer: OutputJsonWriter, header: ObjectHeader, include_usage: bool) -> None:
        fields = _encode(header.fields(writer.chunk_object))
        self._before = fields[:-1] + b',"choices":['
        self._choice_before = self._before + b'{"index":'
        self._end = b',"usage":null}' if include_usage else b"}"
        self._plain_end = b"}]" + self._end
        self._writer = writer
        self._content_json: Callable[[ChoiceUpdate], bytes] = writer.content_json
        self._has_extra_choice_fields = writer.has_extra_choice_fields

    def opening(self, choice: int, usage: TokenUsage | None = None) -> bytes | None:
        opening = self._writer.opening_chunk(choice)
        if opening is None:
            return None
        end = self._rich_end(opening.extra_choice_fields, opening.extra_top_level_fields, usage)
        return self._chunk(choice, opening.content_json, b"null", None, end)

    def update(
        self, update: ChoiceUpdate, top_level_fields: dict[str, Any] | None = None, usage: TokenUsage | None = None
    ) -> bytes:
        """Encodes the chunk of an update. `top_level_fields`: fields beside the choice. `usage`: the usage so far."""
        logprobs = b"null" if update.logprobs is None else _encode(self._writer.logprobs(update))
        is_rich = (
            self._has_extra_choice_fields or update.prompt_logprobs is not None or update.finish_reason is not None
        )
        end = self._plain_end
        if is_rich or usage is not None:
            choice_fields = self._writer.extra_choice_fields(update) | resume_fields.choice_resume_fields(update)
            end = self._rich_end(
                choice_fields, self._writer.extra_top_level_fields(update) | (top_level_fields or {}), usage
            )
        reason = None if update.finish_reason is None else self._writer.client_finish_reason(update)
        return self._chunk(update.choice_index, self._content_json(update), logprobs, reason, end)

    def usage(self, usage: TokenUsage) -> bytes:
        return self._before + b'],"usage":' + _encode(usage.as_json()) + b"}"

    def _rich_end(
        self, choice_fields: dict[str, Any], top_level_fields: dict[str, Any], usage: TokenUsage | None
    ) -> bytes:
        end = self._end if usage is None else b',"usage":' + _encode(usage.as_json()) + b"}"
        return _more_fields(choice_fields) + b"}]" + _more_fields(top_level_fields) + end

    def _chunk(self, choice: int, content: bytes, logprobs: bytes, finish_reason: str | None, end: bytes) -> bytes:
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._choice_before,
            choice,
            content,
            logprobs,
            reason,
            end,
        )


def _more_fields(fields: dict[str, Any]) -> bytes:
    return b"," + _encode(fields)[1:-1] if fields else b""

"""Outputs of completion streams, and where two of them differ. No I/O: lines in, differences out.

Logprobs are compared as they are printed: a float that is read and rounded could hide a difference in its last digits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_END = "[DONE]"
_PER_TOKEN = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class BrokenStream(Exception):
    """The server sent an error event, or the stream ended without its last event."""


@dataclass(slots=True)
class StreamOutput:
    """What a client has read of one stream. A stream that is resumed is read into the same output again."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    """One row per token where logprobs are asked for. Numbers are kept as text."""
    finish_reason: str | None = None
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache, by the usage at the end."""
    last_id: str = ""
    """The newest `id:` line whose event has been read completely: what `Last-Event-ID` sends back."""
    is_whole: bool = False
    _pending_id: str = ""

    def take_line(self, line: str) -> None:
        """Reads one line of an event stream."""
        if line.startswith("id: "):
            self._pending_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            self._take_data(line.removeprefix("data: "))
            self.last_id = self._pending_id

    def _take_data(self, data: str) -> None:
        if data == _END:
            self.is_whole = True
            return
        event = json.loads(data, parse_float=str)
        if "error" in event:
            raise BrokenStream(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["logprobs"]:
                self.logprobs += zip(*(choice["logprobs"][name] for name in _PER_TOKEN), strict=True)
        if event.get("usage"):
            self.num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True, slots=True)
class RepeatedStream:
    """An output that must equal the base output of the stream with this number."""

    stream: int
    output: StreamOutput
    note: str = ""
    """What tells this repeat from others of the same stream."""


@dataclass(frozen=True, slots=True)
class StreamDifference:
    stream: int
    index: int
    """Index of the first token that differs, is missing, or has other logprobs."""
    what: str
    note: str = ""

    def __str__(self) -> str:
        return f"stream {self.stream}{self.note and ' ' + self.note}: {self.what} at token {self.index}"


def first_difference(base: StreamOutput, other: StreamOutput) -> tuple[int, str] | None:
    """The index of the first token at which two outputs differ, and in what."""
    found = []
    if (index := _first_unequal(base.token_ids, other.token_ids)) is not None:
        both = index < min(len(base.token_ids), len(other.token_ids))
        lengths = f"lengths {len(base.token_ids)} and {len(other.token_ids)}"
        found.append((index, f"ids {base.token_ids[index]} and {other.token_ids[index]}" if both else lengths))
    if (index := _first_unequal(base.logprobs, other.logprobs)) is not None:
        found.append((index, "logprobs"))
    if found:
        return min(found, key=lambda one: one[0])
    if base.finish_reason != other.finish_reason:
        return len(base.token_ids), f"finish reasons {base.finish_reason} and {other.finish_reason}"
    return None


def find_differences(base: Sequence[StreamOutput], repeats: Sequence[RepeatedStream]) -> list[StreamDifference]:
    found = []
    for repeat in repeats:
        if (first := first_difference(base[repeat.stream], repeat.output)) is not None:
            found.append(StreamDifference(repeat.stream, *first, repeat.note))
    return found


def _first_unequal(base: Sequence[Any], other: Sequence[Any]) -> int | None:
    for index, (one, two) in enumerate(zip(base, other, strict=False)):
        if one != two:
            return index
    return None if len(base) == len(other) else min(len(base), len(other))


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """One way of computing the streams, compared with the base run."""

    title: str
    num_streams: int
    differences: list[StreamDifference]
    evidence: str = ""
    """What shows that the streams were computed in that way."""
    problem: str | None = None
    """Why the line shows nothing: what it wanted to happen did not happen."""

    @property
    def num_differing(self) -> int:
        return len({one.stream for one in self.differences})

    @property
    def passed(self) -> bool:
        return not self.differences and self.problem is None

    def __str__(self) -> str:
        evidence = self.evidence and f" ({self.evidence})"
        lines = [f"{self.title}: {self.num_differing} of {self.num_streams} streams differ{evidence}"]
        lines += [f"    {one}" for one in self.differences]
        lines += [f"    NOT SHOWN: {self.problem}"] if self.problem is not None else []
        return "\n".join(lines)


def line_result(
    title: str,
    base: Sequence[StreamOutput],
    repeats: Sequence[RepeatedStream],
    evidence: str = "",
    problem: str | None = None,
) -> ComparisonResult:
    num_streams = len({repeat.stream for repeat in repeats})
    if not num_streams:
        problem = problem or "no stream was compared"
    return ComparisonResult(title, num_streams, find_differences(base, repeats), evidence, problem)

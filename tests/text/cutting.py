"""Texts in pieces, for parsers that must not care."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from onward.text.incremental_parser import IncrementalParser
from onward.text.message_events import MessageEvent, merge_events
from onward.text.message_parser import MessageParser

cuts = st.lists(st.integers(0, 400), max_size=12)


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place for place in places if 0 < place < len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def told(
    parser: IncrementalParser | MessageParser, pieces: Sequence[str], *, is_whole: bool = True
) -> list[MessageEvent]:
    """All that the parser says of these pieces; with `is_whole` also of the text's end."""
    events: list[MessageEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return merge_events(events + (parser.finish() if is_whole else []))


def check_any_cutting(
    new_parser: Callable[[], IncrementalParser], text: str, places: Sequence[int]
) -> list[MessageEvent]:
    """However the text is cut the story is the same, at its end and before; and it is the whole text."""
    for is_whole in (False, True):
        once = told(new_parser(), [text], is_whole=is_whole)
        assert told(new_parser(), list(text), is_whole=is_whole) == once
        assert told(new_parser(), cut_at(text, places), is_whole=is_whole) == once
    assert "".join(event.text for event in once) == text
    return once

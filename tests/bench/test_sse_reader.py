from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.bench import sse_reader
from onward.bench.sse_reader import SseReader
from onward.errors import ServerError

STREAM = (
    b': hello\n\nid: 1\ndata: {"a":1}\n\ndata: two\r\ndata: lines\r\n\r\nevent: x\n\ndata:tight\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a":1}', b"two\nlines", b"tight", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_the_bytes_were_cut(cuts: list[int]) -> None:
    reader, edges = SseReader(), [0, *sorted(cuts), len(STREAM)]
    assert [e for a, b in pairwise(edges) for e in reader.feed(STREAM[a:b])] == EVENTS


def test_an_event_that_is_not_whole_is_held_back() -> None:
    reader = SseReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\n") == [b"a"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_reader, "MAX_EVENT_BYTES", 100)
    reader = SseReader()
    assert reader.feed(b"x" * 100) == []
    with pytest.raises(ServerError, match="over 100 bytes"):
        reader.feed(b"x")

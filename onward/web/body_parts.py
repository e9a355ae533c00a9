"""Refuses a body with too many small parts before it is decoded.

Decoding makes a Python object of each list and of each member of an object, and no other Python code of the process runs
meanwhile. A text of megabytes takes milliseconds; as many bytes of empty lists would take most of a second.
"""

from onward.errors import InvalidRequest

MAX_PARTS = 128 << 10
"""Lists, objects and members of objects. A conversation of ten thousand messages has a third of that."""
SLICE_BYTES = 256 << 10
"""Bytes that are scanned at once. Other threads can run between two slices."""
_MARKS = (b"[", b"{", b":")


def check_parts(body: bytes) -> None:
    """Raises `InvalidRequest` for too many parts. A body that is not JSON may pass; the decoder refuses it."""
    if len(body) > MAX_PARTS and _has_many_marks(body) and num_parts(body) > MAX_PARTS:
        problem = f"the body: has more than {MAX_PARTS} lists, objects and members of objects, the limit of this server"
        raise InvalidRequest(problem)


def num_parts(body: bytes) -> int:
    """Counts the parts outside strings. Stops when there are too many."""
    total, start, in_string = 0, 0, False
    while start < len(body) and total <= MAX_PARTS:
        end = min(start + SLICE_BYTES, len(body))
        while end < len(body) and body[end - 1 : end] == b"\\":
            end += 1  # an escape is not cut in two
        unescaped = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        segments = unescaped.split(b'"')
        total += _count(b"".join(segments[in_string::2]))
        in_string ^= len(segments) % 2 == 0
        start = end
    return total


def _has_many_marks(body: bytes) -> bool:
    """Returns whether there may be too many parts. Marks inside strings count too, so the number is an upper bound.
    `in` is a memchr, forty times as fast as `count`: a slice of a long text without marks costs next to nothing."""
    total = 0
    for start in range(0, len(body), SLICE_BYTES):
        piece = body[start : start + SLICE_BYTES]
        total += sum(piece.count(mark) for mark in _MARKS if mark in piece)
    return total > MAX_PARTS


def _count(text: bytes) -> int:
    return sum(text.count(mark) for mark in _MARKS)

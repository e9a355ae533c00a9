"""Small changes to valid messages, chosen by hypothesis, so that a failing case shrinks to few of them.

A message is changed as a tree (a value takes another's place, goes, comes twice, is wrapped) and then encoded, so that
most cases get past the parser. Others are changed as bytes, so that the parser is tested too. Every case ends as bytes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Change = tuple[int, int, int]
"""What is done, where, and with what: reduced to what there is."""

changes = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 1 << 16), st.integers(0, 1 << 16)), min_size=0, max_size=5
)

STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63),
    (1 << 64) - 1, 0.0, -0.0, 0.5, 1e308, -1e308, 1e-320, 1e30, "", "a", "0", "-1", "stop", "\x00", "\n", "é日本🙂",
    "\x1b[2J", "a" * 300, "{{ x }}", "../../etc/passwd", "NaN", [], {}, [[]], [None], {"": None}, [0] * 40,
    ["a"] * 40, {"a": {"b": []}}, [[[[[[[[]]]]]]]], {"id": 0}, {"type": "text", "text": "x"}, [1, "a", None, 2.5],
    "http://h:1", "unix:@x", "tcp:1.2.3.4:5", math.nan, math.inf, -math.inf,
]  # fmt: skip
STRANGE_BYTES = [
    b"", b"\x00", b"\xff", b"\x80", b"\xc1", b"\n", b"\n\n", b";", b",", b":", b"+", b"-", b"0", b"9" * 25, b"{",
    b"[" * 50, b"\xed\xa0\x80", b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x00" * 8, b"\x00\x00\x00\x80\x00\x00\x00\x00",
    b"\xdd\xff\xff\xff\xff", b"data: ", b"id: ", b"event: facts\ndata: ", b": progress a 1 2 3\n",
    b"\xf0\x9f\x99\x82", b"\\ud800", b"1e999", b"-0", b"[" * 3000,
]  # fmt: skip


def changed_tree(tree: Any, todo: list[Change]) -> Any:
    for what, where, value in todo:
        places = _places(tree)
        place = places[where % len(places)]
        tree = _with(tree, place, functools.partial(_changed, what=what, value=value, whole=tree))
    return tree


def _places(tree: Any) -> list[tuple[Any, ...]]:
    """Paths to every node, the root first."""
    found: list[tuple[Any, ...]] = [()]
    if isinstance(tree, dict):
        found += [(key, *rest) for key, value in tree.items() for rest in _places(value)]
    elif isinstance(tree, list):
        found += [(i, *rest) for i, value in enumerate(tree[:50]) for rest in _places(value)]
    return found


def _with(tree: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not place:
        return change(tree)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[place[0]] = _with(copy[place[0]], place[1:], change)
    return copy


def _changed(old: Any, what: int, value: int, whole: Any) -> Any:
    strange = STRANGE[value % len(STRANGE)]
    match what % 8:
        case 0 if isinstance(old, dict) and old:
            return {key: one for i, (key, one) in enumerate(old.items()) if i != value % len(old)}
        case 1 if isinstance(old, list) and old:
            return old[: value % len(old)] + old[value % len(old) + 1 :]
        case 2 if isinstance(old, list):
            return [*old, old[value % len(old)] if old else strange]
        case 3 if isinstance(old, dict):
            return old | {str(strange)[:40]: strange}
        case 4 if isinstance(old, str):
            at = value % (len(old) + 1)
            return old[:at] + str(strange)[:40] + old[at:]
        case 5 if isinstance(old, int):
            return old + value % 7 - 3
        case 6:
            return [old]
        case 7 if value % 8 == 0:
            return whole
    return strange


def changed_bytes(data: bytes, todo: list[Change]) -> bytes:
    for what, where, value in todo:
        at, piece = where % (len(data) + 1), STRANGE_BYTES[value % len(STRANGE_BYTES)]
        match what % 5:
            case 0:
                data = data[:at] + bytes([value & 255]) + data[at + 1 :]
            case 1:
                data = data[:at] + piece + data[at:]
            case 2:
                data = data[:at] + piece + data[at + len(piece) :]
            case 3:
                data = data[:at] + data[at + 1 + value % 16 :]
            case 4:
                data = data[:at] if value % 3 else data + data[at : at + 64]
    return data


def cases(seeds: list[Any], write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """Trees as `seeds`, changed and written, and sometimes changed again as bytes."""

    def build(seed: int, tree_changes: list[Change], byte_changes: list[Change], as_bytes: int) -> bytes:
        data = write(changed_tree(seeds[seed], tree_changes))
        return changed_bytes(data, byte_changes[:2]) if as_bytes == 0 else data

    return st.builds(build, st.integers(0, len(seeds) - 1), changes, changes, st.integers(0, 3))


def byte_cases(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda seed, todo: changed_bytes(seeds[seed], todo), st.integers(0, len(seeds) - 1), changes)

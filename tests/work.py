"""Counts work instead of time: the bytecode instructions that a call executes, its callees included.

The count is the same on every machine, so a test may compare two of them. What C code does is not counted.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_instructions(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

"""A stand-in for a model that solves the task: it gives a fixed answer to each turn of an agent's conversation.

The server around it is real. The turn is the number of tool results in the prompt, so the model keeps no state, and a
conversation that continues at another instance gets the same answers.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from onward.proto.sampling_params import SamplingParams
from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.small_model import END_OF_THOUGHT, EOS, IM_START, THINK

MODEL = "scripted-model"
MAX_MODEL_LEN = 1 << 18
"""Agents send tens of thousands of bytes, each of them a token of the stand-in's tokenizer, and ask for 32,000 more."""
TOOLS_HEADER = [*b"tools:"]
"""How the prompt of a request with tools begins."""
SIDE_ANSWER = "A task"
"""The answer to a request without tools, such as one for a title."""
THOUGHT = b"Let me see."
"""What the model thinks where the prompt has begun a thought."""

Turns = Sequence[str]
_RESULT = [IM_START, *b"tool\n"]
_KEY_TOKENS = 256


def call(name: str, **arguments: Any) -> str:
    """Returns the text by which the model calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer_to(prompt: Sequence[int], turns: Turns, *, has_tools: bool) -> str:
    """Returns the answer to a prompt. `has_tools`: the agent calls tools, and its other requests are not the task's."""
    tokens = list(prompt)
    if has_tools and tokens[: len(TOOLS_HEADER)] != TOOLS_HEADER:
        return SIDE_ANSWER
    starts = (at for at, token in enumerate(tokens) if token == IM_START)
    turn = sum(tokens[at : at + len(_RESULT)] == _RESULT for at in starts)
    return turns[min(turn, len(turns) - 1)]


def chooser(turns: Turns, *, has_tools: bool) -> Callable[[Sequence[int], SamplingParams, Sequence[int]], int]:
    """Returns the function by which a stand-in engine chooses its tokens."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def choose(prompt: Sequence[int], sampling: SamplingParams, tokens: Sequence[int]) -> int:
        key = (len(prompt), *prompt[-_KEY_TOKENS:])
        if key not in answers:
            thoughts = [*THOUGHT, END_OF_THOUGHT] if prompt[-1] == THINK else []
            answers[key] = [*thoughts, *answer_to(prompt, turns, has_tools=has_tools).encode()]
        answer = answers[key]
        return answer[len(tokens)] if len(tokens) < len(answer) else EOS

    return choose


@contextmanager
def instance(folder: Path, turns: Turns, *, has_tools: bool, name: str) -> Iterator[Instance]:
    """Runs a server whose model answers with these turns."""
    model = small_model.prepare(folder, MODEL, MAX_MODEL_LEN, small_model.THINKING_TEMPLATE, ("<think>", "</think>"))
    with running(msgspec.structs.replace(model, quantization="int8"), name=name) as server:
        server.engine.choose = chooser(turns, has_tools=has_tools)
        yield server

"""Fifty prompts for the default model: what it answers freely, and what it has to repeat."""

from tests.models.default_model import PROMPTS

LISTS = [
    "Repeat this list exactly: apple, banana, cherry, apple, banana, cherry, date, elderberry.",
    "Copy: one two three four five six seven eight nine ten. one two three four five six seven",
    "Say it again: The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog.",
    "Echo the code:\nfor i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\n",
    "Repeat: red green blue red green blue red green blue red green",
    "Write the same again: x = 1\ny = 2\nz = x + y\nprint(z)\nx = 1\ny = 2\n",
    'Write this JSON once more: {"a": 1, "b": 2, "c": [1, 2, 3]}',
]
OPENINGS = ["Continue the story", "Answer in detail", "Explain step by step"]
FIFTY = [*PROMPTS, *LISTS, *(f"{opening}: {prompt}" for opening in OPENINGS for prompt in PROMPTS[:7])]
assert len(FIFTY) == 50

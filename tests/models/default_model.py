"""The default model as tests use it: converted once into the user's cache, like `onward serve` does."""

import functools
from typing import Any

import tokenizers

from onward.config import DEFAULT_MODEL
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.proto.model import PreparedModel
from tests.worker.driver import Driver

PROMPTS = [
    "What is the capital of France?", "Write a haiku about rain.", "Explain gravity to a child.",
    "def fibonacci(n):", "The three primary colors are", "List five fruits.", "Once upon a time, in a small village,",
    "How many legs does a spider have?", "Translate 'good morning' into Spanish.", "What is 12 times 9?",
    "The most important thing about friendship is", "Give me advice on learning to swim.", "import numpy as np\n",
    "Name the planets in order.", "Why do cats purr?", "Summarize the story of Romeo and Juliet in one sentence.",
    "In 1969,", "What should I cook tonight?", "Tell me a joke about computers.", "SELECT name FROM users WHERE",
    "Der schnelle braune Fuchs", "What is the boiling point of water in Fahrenheit?",
]  # fmt: skip


@functools.cache
def default_model(quantization: str) -> PreparedModel:
    return prepare(DEFAULT_MODEL, quantization=quantization)


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    model = default_model("int8")
    return tokenizers.Tokenizer.from_file(f"{model.folder}/{model.tokenizer}")


def prompt_ids(text: str) -> list[int]:
    return tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids


def driver(quantization: str, **settings: Any) -> Driver:
    model = default_model(quantization)
    return Driver(model, open_weights(model), **settings)

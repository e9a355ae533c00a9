"""The kinds of answers that Ollama's routes give to requests for output."""

from enum import Enum


class AnswerKind(Enum):
    CHAT = "chat"
    GENERATE = "generate"
    EMBED = "embed"

"""Messages to a prompt, by the model's own Jinja template, in a sandbox.

The result is a function of the request: a template's clock is the request's `created`, in UTC, and chance is taken away
from it. So a resubmitted request renders the same prompt on any machine, at any time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onward.errors import InvalidRequest, StartupError

MAX_PROMPT_CHARS = 32 << 20

Message = Mapping[str, Any]


class ChatTemplate:
    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template is broken: {error}") from error
        special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        self._knows_developer = "developer" in source
        self._max_chars = max_chars

    def render(
        self,
        messages: Sequence[Message],
        *,
        created_s: float,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `variables` are further names that some templates read, such as `enable_thinking`."""
        names: dict[str, Any] = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [self._plain(message, index) for index, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _clock_at(created_s),
        }
        try:
            return self._render_bounded(names)
        except InvalidRequest:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error

    def _render_bounded(self, names: dict[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(names):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise InvalidRequest(f"the prompt is longer than {self._max_chars} characters", param="messages")
            parts.append(part)
        return "".join(parts)

    def _plain(self, message: Message, index: int) -> dict[str, Any]:
        """One message as templates expect it: content is one string. A template that has not heard of `developer` gets
        `system`, which that role replaced."""
        plain = dict(message)
        plain["content"] = _content_text(message.get("content"), index)
        if message.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        return plain


def _content_text(content: Any, index: int) -> str:
    if content is None:  # a message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, (list, tuple)) else [None]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"messages[{index}].content is neither a string nor a list of text parts", param="messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _environment() -> ImmutableSandboxedEnvironment:
    # Templates are written for these settings; without them the line breaks of the prompt come out differently.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    del environment.filters["random"]
    del environment.globals["lipsum"]
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt they are just there."""

    tags = {"generation"}  # noqa: RUF012 (declared as a plain set by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _clock_at(created_s: float) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        return datetime.fromtimestamp(created_s, UTC).strftime(format)

    return strftime_now


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a model should not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

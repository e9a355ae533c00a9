"""Messages to a prompt, by the model's own Jinja template, in a sandbox.

The result is a function of the request: a template's clock is the request's `created`, in UTC, and chance is taken away
from it. So a resubmitted request renders the same prompt on any machine, at any time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2

from onward.errors import InvalidRequest, StartupError
from onward.text import bounded_template
from onward.text.bounded_template import MAX_STEPS, BoundedEnvironment, RenderedPromptTooLong, TemplateLimitExceeded
from onward.text.length_check import CONTEXT_LENGTH_EXCEEDED

MAX_PROMPT_CHARS = 32 << 20

Message = Mapping[str, Any]


class ChatTemplate:
    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        max_chars: int = MAX_PROMPT_CHARS,
        max_steps: int = MAX_STEPS,
    ) -> None:
        try:
            self._template = environment().from_string(source)
        except Exception as error:  # constants are computed here already, and can fail in any way that Python can
            raise StartupError(f"the model's chat template is broken: {error}") from error
        special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        self._knows_developer = "developer" in source
        self._max_chars, self._max_steps = max_chars, max_steps

    def render(
        self,
        messages: Sequence[Message],
        *,
        created_s: float,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_chars: int | None = None,
    ) -> str:
        """Returns the prompt, of at most `max_chars` characters. `variables` are further names that some templates read,
        such as `enable_thinking`."""
        context: dict[str, Any] = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [self._plain(message, index) for index, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _clock_at(created_s),
        }
        try:
            limit = self._max_chars if max_chars is None else min(max_chars, self._max_chars)
            return bounded_template.render(self._template, context, limit, self._max_steps)
        except RenderedPromptTooLong as error:
            raise InvalidRequest(f"messages: {error}", code=CONTEXT_LENGTH_EXCEEDED, param="messages") from None
        except TemplateLimitExceeded as error:
            raise InvalidRequest(f"the model's chat template with these messages: {error}", param="messages") from None
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {str(error)[:500]}", param="messages"
            ) from error

    def _plain(self, message: Message, index: int) -> dict[str, Any]:
        """Returns a message in the form that templates expect, with its content as one string. In a template without
        the role `developer` the role becomes `system`, its predecessor."""
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


def environment() -> BoundedEnvironment:
    env = BoundedEnvironment()
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    return env


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

"""A Jinja environment that bounds the work and the output of a template.

Work is counted in steps (an item of a loop is one, a call several), not in seconds: the result must be a function of
the request, so a slow machine must not refuse what a fast one accepts. A million steps take about a second.

The bounds suffice for a template that the operator has chosen and messages from any client. A hostile template can do
much work in one step; such templates are rendered in a separate process, see `onward.web.template_sandbox`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
STEPS_PER_CALL = 8
MAX_REPEATED = 1 << 20
"""Characters, items or bits that `*` and `**` may make."""

_COUNTER = "_steps"
_COUNTED = "_counted"


class TemplateLimitExceeded(jinja2.TemplateError):
    """The template would do or say more than it may."""


class RenderedPromptTooLong(TemplateLimitExceeded):
    """The output would exceed its maximum length."""


class _StepBudget:
    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, num_steps: int = 1) -> None:
        self.left -= num_steps
        if self.left < 0:
            raise TemplateLimitExceeded("it takes too many steps")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        # Templates are written for these settings; without them the prompt's line breaks come out differently.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters[_COUNTED] = _counted
        del self.filters["random"]
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[_COUNTER].take(STEPS_PER_CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _product_size(left, right) if operator == "*" else _power_bits(left, right)
        if size > MAX_REPEATED:
            raise TemplateLimitExceeded(f"`{operator}` would make something too large")
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int, max_steps: int = MAX_STEPS) -> str:
    """Returns the rendered text. It is measured while it grows, so a text that is too long is never stored. Raises
    `RenderedPromptTooLong` for it."""
    parts: list[str] = []
    num_chars = 0
    for part in template.generate({**variables, _COUNTER: _StepBudget(max_steps)}):
        num_chars += len(part)
        if num_chars > max_chars:
            raise RenderedPromptTooLong(f"the prompt is longer than {max_chars} characters")
        parts.append(part)
    return "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt they are just there."""

    tags = {"generation"}  # noqa: RUF012 (declared as a plain set by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    consume = context[_COUNTER].take
    for item in items:
        consume()
        yield item


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    sequence, times = (left, right) if isinstance(right, int) else (right, left)
    return len(sequence) * times if isinstance(times, int) and isinstance(sequence, (str, list, tuple)) else 0


def _power_bits(left: Any, right: Any) -> int:
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0

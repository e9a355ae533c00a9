"""Structural tags in the form of XGrammar, `{"format": {...}}`, as a grammar in the library's Lark syntax.

    {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}

Free text has to end somewhere, so it is the content of a tag, which its end closes, or the end of the whole output. Other
members of XGrammar's form are refused with their names.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from onward.grammar.grammar_errors import InvalidGrammar

MAX_DEPTH = 32
_ESCAPE_SLASH_OR_BREAK = re.compile(r"\\(.?)|[/\n]", re.DOTALL)
IsSpecial = Callable[[str], bool]
"""Returns whether a name is that of a special token, which is not text."""


Nothing = Annotated[tuple[str, ...], msgspec.Meta(max_length=0)]
"""A list of XGrammar's form that is supported only if it is empty."""


class ConstString(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="const_string"):
    value: str


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class Regex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    pattern: str


class AnyText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="any_text"):
    """Any text, in the places that the module names."""

    excludes: Nothing = ()


class Sequenced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="sequence"):
    elements: list["Format"]


class Alternatives(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="or"):
    elements: list["Format"]


class Tag(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tag"):
    begin: str
    content: "Format"
    end: str | list[str]


class PlainTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tag in a list of tags, where its type need not be given."""

    begin: str
    content: "Format"
    end: str | list[str]
    type: str = "tag"


class TriggeredTags(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="triggered_tags"):
    triggers: list[str]
    tags: list[PlainTag]
    at_least_one: bool = False
    """The output begins with a tag."""
    stop_after_first: bool = False
    """The output ends with the first tag."""
    excludes: Nothing = ()


class SeparatedTags(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tags_with_separator"
):
    tags: list[PlainTag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | Regex | AnyText | Sequenced | Alternatives | Tag | TriggeredTags | SeparatedTags


class FormatTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format


def format_to_lark(source: Any, json_style: Mapping[str, Any], is_special: IsSpecial) -> str:
    try:
        tag = msgspec.convert(source, FormatTag)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidGrammar(str(error)) from error
    writer = _LarkWriter(json_style, is_special)
    start = writer.write(tag.format, "format", is_last=True, depth=0)
    return "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *writer.rules])


class _LarkWriter:
    """Writes the rules of a format. Each method returns an expression for its part."""

    def __init__(self, json_style: Mapping[str, Any], is_special: IsSpecial) -> None:
        self.rules: list[str] = []
        self._json_style = json_style
        self._is_special = is_special

    def write(self, part: Format, path: str, *, is_last: bool, depth: int) -> str:
        """Returns an expression for this part, and adds the rules that it needs. `is_last`: nothing follows this part
        in the output. Raises `InvalidGrammar` with `path` if the part is not supported or nested too deep."""
        if depth > MAX_DEPTH:
            raise InvalidGrammar(f"{path}: is nested more than {MAX_DEPTH} deep")
        match part:
            case ConstString(value):
                return self.text(value)
            case JsonSchema(schema):
                styled = {"x-guidance": dict(self._json_style)} | schema if isinstance(schema, dict) else schema
                return self._rule("%json " + json_value(styled))
            case Regex(pattern):
                return self._terminal(pattern, path)
            case AnyText() if is_last:
                return "TEXT"
            case AnyText():
                raise InvalidGrammar(
                    f"{path}: any_text is supported as the content of a tag, and at the end of the output"
                )
            case Sequenced(elements):
                last = len(elements) - 1
                parts = [
                    self.write(item, f"{path}.elements[{at}]", is_last=is_last and at == last, depth=depth + 1)
                    for at, item in enumerate(elements)
                ]
                return self._rule(" ".join(_some(parts, f"{path}.elements")))
            case Alternatives(elements):
                parts = [
                    self.write(item, f"{path}.elements[{at}]", is_last=is_last, depth=depth + 1)
                    for at, item in enumerate(elements)
                ]
                return self._rule(" | ".join(_some(parts, f"{path}.elements")))
            case Tag(begin, content, end):
                return self._tag(begin, content, end, path, is_last=is_last, depth=depth)
            case TriggeredTags():
                return self._triggered_tags(part, path, is_last=is_last, depth=depth)
            case SeparatedTags():
                return self._separated_tags(part, path, depth=depth)

    def text(self, value: str) -> str:
        """Returns an expression for exactly this text. A special token is a symbol of its own."""
        return value if self._is_special(value) else literal(value) if value else ""

    def _rule(self, body: str) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, pattern: str, path: str) -> str:
        if not pattern:
            raise InvalidGrammar(f"{path}.pattern: must not be empty")
        escaped = _ESCAPE_SLASH_OR_BREAK.sub(lambda found: _in_lark(found, path), pattern)
        name = f"PART_{len(self.rules)}"
        self.rules.append(f"{name}: /{escaped}/")
        return name

    def _tag(self, begin: str, content: Format, end: str | list[str], path: str, *, is_last: bool, depth: int) -> str:
        return self._rule(f"{self.text(begin)} {self._rest_of_tag(content, end, path, is_last=is_last, depth=depth)}")

    def _rest_of_tag(self, content: Format, end: str | list[str], path: str, *, is_last: bool, depth: int) -> str:
        """Returns an expression for a tag without its beginning."""
        ends = [end] if isinstance(end, str) else _some(end, f"{path}.end")
        if isinstance(content, AnyText) and all(ends):
            return self._rule(" | ".join(self._text_up_to(value) for value in ends))
        is_open = is_last and not any(ends)
        body = self.write(content, f"{path}.content", is_last=is_open, depth=depth + 1)
        written = [self.text(value) for value in ends]
        return (
            body
            if not any(written)
            else self._rule(f"{body} ({' | '.join(value or chr(34) * 2 for value in written)})")
        )

    def _text_up_to(self, end: str) -> str:
        """Returns an expression for text with this at its end and nowhere before."""
        if self._is_special(end):
            return f"TEXT {end}"
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {literal(end)}")
        return name

    def _triggered_tags(self, part: TriggeredTags, path: str, *, is_last: bool, depth: int) -> str:
        tags = _some(part.tags, f"{path}.tags")
        whole = [self._plain_tag(tag, f"{path}.tags[{at}]", depth) for at, tag in enumerate(tags)]
        if part.at_least_one and part.stop_after_first:
            return self._rule(" | ".join(whole))
        if not is_last:
            raise InvalidGrammar(
                f"{path}: triggered_tags contain free text, so they are supported at the end of the output"
            )
        after_text = [self._after_text(part, at, path, depth) for at in range(len(tags))]
        first = f"({' | '.join(whole)}) " if part.at_least_one else ""
        if part.stop_after_first:
            return self._rule(" | ".join([*after_text, "TEXT"]))
        return self._rule(f"{first}({' | '.join(after_text)})* TEXT")

    def _after_text(self, part: TriggeredTags, index: int, path: str, depth: int) -> str:
        """Returns an expression for text without triggers and then a tag."""
        tag, path = part.tags[index], f"{path}.tags[{index}]"
        trigger = next((found for found in part.triggers if found and tag.begin.startswith(found)), None)
        if trigger is None:
            raise InvalidGrammar(f"{path}.begin: none of the triggers stands at its beginning")
        rest = self._rest_of_tag(tag.content, tag.end, path, is_last=False, depth=depth)
        return self._rule(f"{self._text_up_to(trigger)} {self.text(tag.begin[len(trigger) :])} {rest}")

    def _separated_tags(self, part: SeparatedTags, path: str, *, depth: int) -> str:
        tags = _some(part.tags, f"{path}.tags")
        one = self._rule(" | ".join(self._plain_tag(tag, f"{path}.tags[{at}]", depth) for at, tag in enumerate(tags)))
        several = one if part.stop_after_first else f"{one} ({self.text(part.separator)} {one})*"
        return self._rule(several if part.at_least_one else f"({several})?")

    def _plain_tag(self, tag: PlainTag, path: str, depth: int) -> str:
        if tag.type != "tag":
            raise InvalidGrammar(f"{path}.type: must be tag")
        return self._tag(tag.begin, tag.content, tag.end, path, is_last=False, depth=depth)


def _in_lark(found: re.Match[str], path: str) -> str:
    """Returns an escape, a slash or a line break for a regular expression in a grammar. A slash would end the expression,
    and a line break the rule."""
    if found[0] == "\\":
        raise InvalidGrammar(f"{path}.pattern: must not end with a backslash")
    character = found[1] if found[1] is not None else found[0]
    if character == "\n":
        return r"\n"
    return found[0] if found[1] is not None else "\\" + character


def _some(items: Sequence[Any], path: str) -> Any:
    if not items:
        raise InvalidGrammar(f"{path}: must not be empty")
    return items


def literal(text: str) -> str:
    """Returns a string in a Lark grammar that stands for exactly this text."""
    return _without_delete(json.dumps(text, ensure_ascii=False))


def json_value(value: Any) -> str:
    """Returns a value behind `%json`."""
    return _without_delete(json.dumps(value))


def _without_delete(source: str) -> str:
    # JSON lets U+007F stand as it is. The library's lexer takes it for no character of a string.
    return source.replace("\x7f", "\\u007f")

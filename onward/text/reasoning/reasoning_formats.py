"""Models that think aloud between two tags before they answer, by name, and which of them a chat template belongs to.

Thinking is at the beginning of a text, once: a tag that comes later is words about tags. Where the prompt has opened it
already, the text begins inside. Blanks right behind a tag belong to the tag.
"""

from dataclasses import dataclass
from types import MappingProxyType

from onward.text.incremental_parser import IncrementalParser, ParseSteps
from onward.text.message_events import ContentText, MarkupText, ReasoningText


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begin: str = "<think>"
    end: str = "</think>"
    starts_in_reasoning_by_default: bool = False
    """Where the prompt does not say: whether the text is thinking from its first character on."""

    forced_end_prefix: str = "\n"
    """Text before an end tag that a budget forces."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be shown to the parser even where they are special tokens."""
        return (self.begin, self.end)

    def output_starts_inside(self, prompt_end: str) -> bool:
        """Returns whether the output begins inside the reasoning if the prompt ends with this text."""
        if self.prompt_ends_inside(prompt_end):
            return True
        return self.starts_in_reasoning_by_default and not prompt_end.rstrip().endswith(self.end)

    def prompt_ends_inside(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.begin)

    def parser(self, starts_inside: bool) -> IncrementalParser:
        return IncrementalParser(lambda parser: self._read(parser, starts_inside))

    def _read(self, parser: IncrementalParser, starts_inside: bool) -> ParseSteps[None]:
        yield from parser.read_whitespace()
        if starts_inside:
            parser.emit_held(MarkupText)
        # If the prompt has opened the reasoning, the model may still open it again or close it at once.
        tag = yield from parser.read_one_of(self.markers if starts_inside else (self.begin,))
        if tag == self.begin:
            yield from self._end_tag(parser)
        if tag == self.begin or (starts_inside and tag is None):
            parser.emit_held(ReasoningText)
            tag = self.end if (yield from parser.emit_until(self.end, ReasoningText)) else None
        if tag == self.end:
            yield from self._end_tag(parser)
        yield from parser.emit_rest(ContentText)

    def _end_tag(self, parser: IncrementalParser) -> ParseSteps[None]:
        yield from parser.read_whitespace()
        parser.emit_held(MarkupText)


_ALL = (
    ReasoningFormat("think"),
    ReasoningFormat("qwen3"),
    ReasoningFormat("deepseek_r1", starts_in_reasoning_by_default=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
)
REASONING_FORMATS = MappingProxyType({one.name: one for one in _ALL})


def select_reasoning_format(setting: str, template: str | None) -> ReasoningFormat | None:
    """Returns the format that `--reasoning-parser` selects: a format by its name, or with `auto` the one that the
    chat template shows. Returns None for `none`, and with `auto` for a template without reasoning tags."""
    name = detect_reasoning_format(template or "") if setting == "auto" else setting
    return None if name is None or name == "none" else REASONING_FORMATS[name]


def detect_reasoning_format(template: str) -> str | None:
    """Returns the name of the format of models with this template, or None if they write no reasoning."""
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return None
    if "<｜Assistant｜>" in template:
        return "deepseek_r1"
    return "qwen3" if "enable_thinking" in template or "reasoning_content" in template else "think"

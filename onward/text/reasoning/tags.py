"""Models that think aloud between two tags before they answer, by name, and which of them a chat template belongs to.

Thinking is at the beginning of a text, once: a tag that comes later is words about tags. Where the prompt has opened it
already, the text begins inside. Blanks right behind a tag belong to the tag.
"""

from dataclasses import dataclass
from types import MappingProxyType

from onward.text.message_events import Content, Markup, Reasoning
from onward.text.piecewise import Piecewise, Steps


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begin: str = "<think>"
    end: str = "</think>"
    begins_inside: bool = False
    """Where the prompt does not say: whether the text is thinking from its first character on."""

    forced_lead: str = "\n"
    """What comes before an end that a budget forces."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must be shown to the parser even where they are special tokens."""
        return (self.begin, self.end)

    def is_open(self, prompt_end: str) -> bool:
        """Whether a text behind a prompt with this end begins inside the thinking."""
        if self.is_opened_by(prompt_end):
            return True
        return self.begins_inside and not prompt_end.rstrip().endswith(self.end)

    def is_opened_by(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.begin)

    def parser(self, begins_inside: bool) -> Piecewise:
        return Piecewise(lambda source: self._read(source, begins_inside))

    def _read(self, source: Piecewise, begins_inside: bool) -> Steps[None]:
        yield from source.blanks()
        if begins_inside:
            source.tell(Markup)
        # One that the prompt has opened may be opened once more, or closed at once.
        tag = yield from source.one_of(self.marks if begins_inside else (self.begin,))
        if tag == self.begin:
            yield from self._end_tag(source)
        if tag == self.begin or (begins_inside and tag is None):
            source.tell(Reasoning)
            tag = self.end if (yield from source.until(self.end, Reasoning)) else None
        if tag == self.end:
            yield from self._end_tag(source)
        yield from source.rest(Content)

    def _end_tag(self, source: Piecewise) -> Steps[None]:
        yield from source.blanks()
        source.tell(Markup)


_ALL = (
    ReasoningFormat("think"),
    ReasoningFormat("qwen3"),
    ReasoningFormat("deepseek_r1", begins_inside=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
)
FORMATS = MappingProxyType({one.name: one for one in _ALL})


def chosen(knob: str, template: str | None) -> ReasoningFormat | None:
    """The format that `--reasoning-parser` asks for: one by its name, or `auto` or `none`."""
    name = detect(template or "") if knob == "auto" else knob
    return None if name is None or name == "none" else FORMATS[name]


def detect(template: str) -> str | None:
    """The name of the format of models with this template. None: they do not think aloud."""
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return None
    if "<｜Assistant｜>" in template:
        return "deepseek_r1"
    return "qwen3" if "enable_thinking" in template or "reasoning_content" in template else "think"

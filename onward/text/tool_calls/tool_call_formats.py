"""The ways in which models write calls, by name, and which one a model's chat template asks for."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType

from onward.text.incremental_parser import IncrementalParser, ParseSteps
from onward.text.tool_calls import deepseek, hermes, llama3, mistral, plain_json, pythonic
from onward.text.tool_calls.call_ids import IdStyle
from onward.text.tool_calls.call_reader import ToolCallReader


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    name: str
    read: Callable[[ToolCallReader], ParseSteps[None]]
    markers: tuple[str, ...] = ()
    """Texts that must be shown to the parser even where they are special tokens, which a reader is not shown."""
    only_known_names: bool = False
    """A call of an unknown tool is content."""
    id_style: IdStyle = "openai"

    def parser(self, tool_names: Collection[str]) -> IncrementalParser:
        return IncrementalParser(lambda parser: self.read(ToolCallReader(parser, tool_names, self.only_known_names)))


def raw_call_parser(name: str) -> IncrementalParser:
    """Returns a parser for a text that is as a whole the input of a call of this tool."""
    return IncrementalParser(lambda parser: ToolCallReader(parser, (name,)).read_raw(name))


_ALL = (
    ToolCallFormat("hermes", hermes.read, hermes.MARKS),
    ToolCallFormat("llama3_json", llama3.read, llama3.MARKS, only_known_names=True),
    ToolCallFormat("pythonic", pythonic.read, pythonic.MARKS, only_known_names=True),
    ToolCallFormat("mistral", mistral.read, mistral.MARKS, id_style="mistral"),
    ToolCallFormat("deepseek_v3", deepseek.read_v3, deepseek.MARKS),
    ToolCallFormat("deepseek_v31", deepseek.read_v31, deepseek.MARKS),
    ToolCallFormat("json", plain_json.read, only_known_names=True),
)
_SHOWS_PYTHON_CALLS = re.compile(r"\[\w+\(\w+=")
TOOL_CALL_FORMATS = MappingProxyType({one.name: one for one in _ALL})


def select_tool_call_format(setting: str, template: str | None) -> ToolCallFormat | None:
    """Returns the format that `--tool-call-parser` selects: a format by its name, or with `auto` the one that
    the chat template shows. Returns None for `none`."""
    name = detect_tool_call_format(template or "") if setting == "auto" else setting
    return None if name == "none" else TOOL_CALL_FORMATS[name]


def detect_tool_call_format(template: str) -> str:
    """Returns the name of the call format that the template describes, or `json` if it describes none that is known
    here. A template that lists tools without a call format leaves the model with JSON."""
    if deepseek.CALLS_BEGIN in template:
        return "deepseek_v3" if deepseek.FENCE_BEGIN in template else "deepseek_v31"
    if mistral.BEGIN in template:
        return "mistral"
    if hermes.BEGIN in template and "<function=" not in template:
        return "hermes"
    if pythonic.TAG in template or _SHOWS_PYTHON_CALLS.search(template):
        return "pythonic"
    if llama3.TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3_json"
    return "json"

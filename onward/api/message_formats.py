"""How the served model writes calls and thoughts, and what takes the text of one answer apart by it. Knows no tokens but
those of a prompt's end."""

from collections.abc import Collection

from onward.api.prepared import Prepared
from onward.api.requests import ChatRequest
from onward.config import ReasoningParser, ToolCallParser
from onward.text.message_stream import MessageStream
from onward.text.piecewise import Piecewise
from onward.text.reasoning import tags
from onward.text.reasoning.budget import is_open_behind
from onward.text.tokenizer import Tokenizer
from onward.text.tool_calls import formats
from onward.text.tool_calls.formats import FORMATS, ToolCallFormat
from onward.text.tool_calls.ids import IdStyle
from onward.text.tool_messages import knows_tools
from onward.web.tooling import FORMAT_OF_FORCED_CALLS, ToolPlan


class MessageFormats:
    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer | None,
        tool_call_parser: ToolCallParser,
        reasoning_parser: ReasoningParser,
    ) -> None:
        # A model whose template knows no tools is told in words to call them as JSON.
        is_told_in_words = tool_call_parser == "auto" and not knows_tools(template or "")
        self._calls = FORMATS["json"] if is_told_in_words else formats.chosen(tool_call_parser, template)
        self.reasoning = tags.chosen(reasoning_parser, template)
        self._tokenizer = tokenizer

    @property
    def id_style(self) -> IdStyle:
        return "openai" if self._calls is None else self._calls.id_style

    @property
    def marks(self) -> Collection[str]:
        """Texts that must be seen even where they are special tokens."""
        return (*(self._calls.marks if self._calls else ()), *(self.reasoning.marks if self.reasoning else ()))

    def new_stream(self, prepared: Prepared) -> MessageStream | None:
        """None if there is nothing to take apart in the answer to this request."""
        calls = self._calls_of(prepared.plan)
        reasoning = self._reasoning_of(prepared)
        if calls is None and reasoning is None:
            return None
        parser = None if calls is None else calls.parser(prepared.plan.names)
        return MessageStream(reasoning, parser, prepared.plan.max_calls)

    def _calls_of(self, plan: ToolPlan) -> ToolCallFormat | None:
        if plan.mode == "none":
            return None
        return FORMATS[FORMAT_OF_FORCED_CALLS] if plan.is_forced else self._calls

    def _reasoning_of(self, prepared: Prepared) -> Piecewise | None:
        form = self.reasoning
        if form is None or self._tokenizer is None:
            return None
        if prepared.structure is not None and prepared.thinking is None:
            return None  # nobody can follow it, so all of the text is what was asked for
        request = prepared.request
        goes_on = isinstance(request, ChatRequest) and bool(request.continue_final_message)
        is_open = is_open_behind(form, self._tokenizer, prepared.prompts[0], goes_on=goes_on)
        return None if goes_on and not is_open else form.parser(is_open)

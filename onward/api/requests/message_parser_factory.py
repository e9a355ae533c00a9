"""How the served model writes calls and thoughts, and what takes the text of one answer apart by it. Knows no tokens but
those of a prompt's end."""

from collections.abc import Collection

from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest
from onward.config import ReasoningParser, ToolCallParser
from onward.text.incremental_parser import IncrementalParser
from onward.text.message_parser import MessageParser
from onward.text.reasoning import reasoning_formats
from onward.text.reasoning.prompt_state import starts_in_reasoning
from onward.text.tokenizer import Tokenizer
from onward.text.tool_calls import tool_call_formats
from onward.text.tool_calls.call_ids import IdStyle
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS, ToolCallFormat
from onward.text.tool_messages import template_reads_tools
from onward.web.openai_api.tools import FORCED_CALL_FORMAT, ResolvedTools


class MessageParserFactory:
    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer | None,
        tool_call_parser: ToolCallParser,
        reasoning_parser: ReasoningParser,
    ) -> None:
        # A model whose template knows no tools is told in words to call them as JSON.
        is_told_in_words = tool_call_parser == "auto" and not template_reads_tools(template or "")
        self._calls = (
            TOOL_CALL_FORMATS["json"]
            if is_told_in_words
            else tool_call_formats.select_tool_call_format(tool_call_parser, template)
        )
        self.reasoning = reasoning_formats.select_reasoning_format(reasoning_parser, template)
        self._tokenizer = tokenizer

    @property
    def id_style(self) -> IdStyle:
        return "openai" if self._calls is None else self._calls.id_style

    @property
    def markers(self) -> Collection[str]:
        """Texts that must be seen even where they are special tokens."""
        return (*(self._calls.markers if self._calls else ()), *(self.reasoning.markers if self.reasoning else ()))

    def new_parser(self, prepared: PreparedRequest) -> MessageParser | None:
        """None if there is nothing to take apart in the answer to this request."""
        calls = self._calls_of(prepared.tools)
        reasoning = self._reasoning_of(prepared)
        if calls is None and reasoning is None:
            return None
        parser = None if calls is None else calls.parser(prepared.tools.names)
        return MessageParser(reasoning, parser, prepared.tools.max_calls)

    def _calls_of(self, plan: ResolvedTools) -> ToolCallFormat | None:
        if plan.tool_choice == "none":
            return None
        return TOOL_CALL_FORMATS[FORCED_CALL_FORMAT] if plan.is_forced else self._calls

    def _reasoning_of(self, prepared: PreparedRequest) -> IncrementalParser | None:
        form = self.reasoning
        if form is None or self._tokenizer is None:
            return None
        if prepared.grammar is not None and prepared.reasoning is None:
            return None  # nobody can follow it, so all of the text is what was asked for
        request = prepared.request
        goes_on = isinstance(request, ChatCompletionRequest) and bool(request.continue_final_message)
        is_open = starts_in_reasoning(form, self._tokenizer, prepared.prompt_token_ids[0], continues_message=goes_on)
        return None if goes_on and not is_open else form.parser(is_open)

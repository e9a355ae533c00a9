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
        is_prompted_format = tool_call_parser == "auto" and not template_reads_tools(template or "")
        self._call_format = (
            TOOL_CALL_FORMATS["json"]
            if is_prompted_format
            else tool_call_formats.select_tool_call_format(tool_call_parser, template)
        )
        self.reasoning = reasoning_formats.select_reasoning_format(reasoning_parser, template)
        self._tokenizer = tokenizer

    @property
    def id_style(self) -> IdStyle:
        return "openai" if self._call_format is None else self._call_format.id_style

    @property
    def markers(self) -> Collection[str]:
        """Texts that must be seen even where they are special tokens."""
        return (
            *(self._call_format.markers if self._call_format else ()),
            *(self.reasoning.markers if self.reasoning else ()),
        )

    def new_parser(self, prepared: PreparedRequest) -> MessageParser | None:
        """None if there is nothing to take apart in the answer to this request."""
        call_format = self._call_format_of(prepared.tools)
        reasoning_parser = self._reasoning_of(prepared)
        if call_format is None and reasoning_parser is None:
            return None
        call_parser = None if call_format is None else call_format.parser(prepared.tools.names)
        return MessageParser(reasoning_parser, call_parser, prepared.tools.max_calls)

    def _call_format_of(self, tools: ResolvedTools) -> ToolCallFormat | None:
        if tools.tool_choice == "none":
            return None
        return TOOL_CALL_FORMATS[FORCED_CALL_FORMAT] if tools.is_forced else self._call_format

    def _reasoning_of(self, prepared: PreparedRequest) -> IncrementalParser | None:
        reasoning_format = self.reasoning
        if reasoning_format is None or self._tokenizer is None:
            return None
        if prepared.grammar is not None and prepared.reasoning is None:
            return None  # nobody can follow it, so all of the text is what was asked for
        request = prepared.request
        continues_message = isinstance(request, ChatCompletionRequest) and bool(request.continue_final_message)
        starts_inside = starts_in_reasoning(
            reasoning_format, self._tokenizer, prepared.prompt_token_ids[0], continues_message=continues_message
        )
        return None if continues_message and not starts_inside else reasoning_format.parser(starts_inside)

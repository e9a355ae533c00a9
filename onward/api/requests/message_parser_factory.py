"""Selects the formats in which the served model writes tool calls and reasoning, and makes the parser of each output. The
only tokens that it looks at are those at the end of a prompt."""

from collections.abc import Collection, Sequence

from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest
from onward.config import ReasoningParser, ToolCallParser
from onward.proto.reasoning_params import ReasoningParams
from onward.text.incremental_parser import IncrementalParser
from onward.text.message_parser import MessageParser
from onward.text.reasoning import reasoning_formats
from onward.text.reasoning.prompt_state import make_reasoning_params, starts_in_reasoning
from onward.text.reasoning.reasoning_formats import ReasoningFormat
from onward.text.reasoning.reasoning_tracker import find_forbidden_forced_token
from onward.text.tokenizer import Tokenizer
from onward.text.tool_calls import tool_call_formats
from onward.text.tool_calls.call_ids import IdStyle
from onward.text.tool_calls.custom_input import CustomCallConverter
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS, ToolCallFormat, raw_call_parser
from onward.text.tool_messages import template_reads_tools
from onward.web.json_body import field_error
from onward.web.openai_api.tools import FORCED_CALL_FORMAT, ResolvedTools


class MessageParserFactory:
    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer | None,
        tool_call_parser: ToolCallParser,
        reasoning_parser: ReasoningParser,
    ) -> None:
        # If the model's template does not render tools, the prompt tells the model to write calls as JSON.
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
        """Texts that the parser must see even if they are special tokens."""
        return (
            *(self._call_format.markers if self._call_format else ()),
            *(self.reasoning.markers if self.reasoning else ()),
        )

    def new_parser(self, prepared: PreparedRequest) -> MessageParser | None:
        """Returns a parser for one choice of this request. None if its output has neither calls nor reasoning to parse."""
        tools, reasoning_parser = prepared.tools, self._reasoning_of(prepared)
        call_parser = self._call_parser_of(tools)
        if call_parser is None and reasoning_parser is None:
            return None
        names = tools.custom_names
        custom_calls = CustomCallConverter(names, is_raw=tools.raw_tool is not None) if names else None
        return MessageParser(reasoning_parser, call_parser, tools.max_calls, custom_calls)

    def _call_parser_of(self, tools: ResolvedTools) -> IncrementalParser | None:
        if tools.raw_tool is not None:
            return raw_call_parser(tools.raw_tool.definition.name)
        call_format = self._call_format_of(tools)
        return None if call_format is None else call_format.parser(tools.names)

    def _call_format_of(self, tools: ResolvedTools) -> ToolCallFormat | None:
        if tools.tool_choice == "none":
            return None
        return TOOL_CALL_FORMATS[FORCED_CALL_FORMAT] if tools.is_forced else self._call_format

    def _reasoning_of(self, prepared: PreparedRequest) -> IncrementalParser | None:
        reasoning_format = self.reasoning
        if reasoning_format is None or self._tokenizer is None:
            return None
        if prepared.grammar is not None and prepared.reasoning is None:
            return None  # no worker tracks the reasoning, so the grammar applies to the whole text
        request = prepared.request
        continues_message = isinstance(request, ChatCompletionRequest) and bool(request.continue_final_message)
        starts_inside = starts_in_reasoning(
            reasoning_format, self._tokenizer, prepared.prompt_token_ids[0], continues_message=continues_message
        )
        return None if continues_message and not starts_inside else reasoning_format.parser(starts_inside)


def check_forced_end(params: ReasoningParams | None, end_token_ids: Collection[int], min_tokens: int) -> None:
    """Refuses a request whose budget forces a token that its `min_tokens` forbids."""
    token_id = None if params is None else find_forbidden_forced_token(params, end_token_ids, min_tokens)
    if params is not None and token_id is not None:
        problem = f"token {token_id} ends thinking when thinking_budget ({params.budget}) is used up, and min_tokens"
        raise field_error(
            "stop_token_ids", f"{problem} ({min_tokens}) forbids it there; leave it out or lower min_tokens"
        )


def build_reasoning_params(
    reasoning_format: ReasoningFormat | None,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    budget: int | None,
    *,
    has_grammar: bool,
    continues_message: bool = False,
) -> ReasoningParams | None:
    """Returns the parameters by which the worker tracks reasoning. None if it need not: only a budget, or a grammar that
    applies after the reasoning, needs them. `continues_message`: the output continues a message that has begun in the
    prompt."""
    if reasoning_format is None or tokenizer is None:
        if budget is not None:
            raise field_error("thinking_budget", "this model does not mark its thinking, or --reasoning-parser is none")
        return None
    if budget is None and not has_grammar:
        return None
    starts_inside = starts_in_reasoning(
        reasoning_format, tokenizer, prompt_token_ids, continues_message=continues_message
    )
    params = make_reasoning_params(reasoning_format, tokenizer, starts_inside=starts_inside, budget=budget)
    if params is None and budget is not None:
        problem = f"the tags {reasoning_format.begin} and {reasoning_format.end} are not in this model's vocabulary"
        raise field_error("thinking_budget", f"{problem}, so thinking cannot be followed")
    return params

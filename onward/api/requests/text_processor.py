"""Everything about text that needs the model's files: prompts in, text streams out. Runs in a thread; knows no HTTP."""

from collections.abc import Callable, Sequence

from onward.api.lifecycle.logprobs_json import TextOffsets, TokenStrings
from onward.api.requests.grammar_validator import GrammarValidator
from onward.api.requests.message_parser_factory import MessageParserFactory
from onward.api.requests.schemas import ChatCompletionRequest, CompletionRequest
from onward.config import ReasoningParser, ToolCallParser
from onward.errors import InvalidRequest
from onward.proto.model import TokenizerFiles
from onward.proto.sampling_params import SamplingParams
from onward.text.bad_words import bad_word_token_ids
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer, TemplateOptions, TemplateRenderer
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable, with_visible_markers
from onward.text.tokenizer import Tokenizer
from onward.text.tool_messages import Message
from onward.web.json_body import field_error
from onward.web.openai_api.template_fields import template_options
from onward.web.template_sandbox import TemplateSandboxPool
from onward.web.template_sandbox_child import RenderJob


class TextProcessor:
    """`sandboxes`: where templates of clients are rendered."""

    def __init__(
        self,
        files: TokenizerFiles,
        sandboxes: TemplateSandboxPool | None = None,
        make_validator: Callable[[TokenizerFiles, Tokenizer | None], GrammarValidator] = GrammarValidator,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens`: of the model's context. Texts that are far longer are refused before they are tokenized."""
        self.max_tokens = max_tokens
        self.prompt_tokenizer = PromptTokenizer(files)
        self._files = files
        self._sandboxes = sandboxes
        self._tokenizer = self.prompt_tokenizer.tokenizer
        self._table = self._tokenizer.table if self._tokenizer else TokenTable([])
        self.token_strings = TokenStrings(self._table)
        self.grammar_validator = make_validator(files, self._tokenizer)
        self.message_parsers = MessageParserFactory(
            files.chat_template, self._tokenizer, tool_call_parser, reasoning_parser
        )
        self._marked_table = with_visible_markers(self._table, self.message_parsers.markers)

    def tokenize_chat(self, request: ChatCompletionRequest, created_s: int) -> list[int]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        return self.tokenize_messages(request.messages, template_options(request), request.chat_template, created_s)

    def tokenize_messages(
        self, messages: Sequence[ChatMessage], options: TemplateOptions, template: str | None, created_s: int
    ) -> list[int]:
        """`template`: the client's own."""
        renderer = None if template is None else self._sandboxed_renderer(template, created_s)
        return self.prompt_tokenizer.tokenize_chat(messages, created_s, options, renderer, self.max_tokens)

    def tokenize_completion(self, request: CompletionRequest) -> list[list[int]]:
        return [
            self.tokenize_prompt(prompt, request.prompt_path(index)) for index, prompt in enumerate(request.prompts())
        ]

    def tokenize_prompt(self, prompt: str | list[int], path: str) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return self.prompt_tokenizer.tokenize_text(prompt, self.max_tokens)
        except InvalidRequest as error:
            raise _with_field_path(error, path) from error

    def tokenize_text(self, text: str, path: str, *, add_special_tokens: bool) -> list[int]:
        """Of a text that need not be a prompt: it may be empty."""
        if self._tokenizer is None:
            raise field_error(path, "this model has no tokenizer")
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=self.max_tokens)
        except InvalidRequest as error:
            raise _with_field_path(error, path) from error

    def _sandboxed_renderer(self, source: str, created_s: int) -> TemplateRenderer:
        sandboxes, files = self._sandboxes, self._files
        assert sandboxes is not None, "checked with the request"

        def render(messages: list[Message], options: TemplateOptions) -> str:
            job = RenderJob(
                source,
                [dict(message) for message in messages],
                created_s,
                files.bos_token,
                files.eos_token,
                options.adds_generation_prompt,
                tools=options.tools,
                variables=options.variables,
            )
            return sandboxes.render(job)

        return TemplateRenderer.from_source(source, render)

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        return self._table.decode(token_ids, skip_special_tokens=not with_special)

    def tokenize_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        return bad_word_token_ids(words, self._tokenizer)

    def new_text_offsets(self, *, with_special: bool = False) -> TextOffsets:
        return TextOffsets(self._table, skip_special_tokens=not with_special)

    def new_text_stream(self, stop: list[str], sampling: SamplingParams, include_stop: bool = False) -> TextStream:
        return self._make_text_stream(self._table, stop, sampling, include_stop)

    def new_text_stream_with_markers(
        self, stop: list[str], sampling: SamplingParams, include_stop: bool = False
    ) -> TextStream:
        """For who takes it apart: with the marks around calls and thoughts."""
        return self._make_text_stream(self._marked_table, stop, sampling, include_stop)

    def _make_text_stream(
        self, table: TokenTable, stop: list[str], sampling: SamplingParams, include_stop: bool
    ) -> TextStream:
        if stop and self._tokenizer is None:
            raise field_error(
                "stop", "this model has no tokenizer, so there is no text to find it in; use stop_token_ids"
            )
        return TextStream(
            table,
            tuple(stop),
            include_stop,
            end_token_ids=sampling.end_token_ids,
            min_tokens=sampling.min_tokens,
        )


def _with_field_path(error: InvalidRequest, path: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {error.message.removeprefix('prompt: ')}", code=error.code, param=path)

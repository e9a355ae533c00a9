"""Text work that needs the model's files: tokenizes prompts and makes text streams. Runs in a thread; knows no HTTP."""

from collections.abc import Callable, Sequence

from onward.api.lifecycle.logprobs_json import TextOffsets, TokenIdStrings, TokenStrings
from onward.api.requests.grammar_validator import GrammarValidator
from onward.api.requests.message_parser_factory import MessageParserFactory
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    TextGenerationRequest,
)
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
from onward.text.truncation import Truncation
from onward.web.json_body import field_error
from onward.web.openai_api.template_fields import template_options
from onward.web.template_sandbox import TemplateSandboxPool
from onward.web.template_sandbox_child import RenderJob


class TextProcessor:
    """The model's tokenizer, chat template and parsers. `sandboxes` render templates of clients."""

    def __init__(
        self,
        files: TokenizerFiles,
        sandboxes: TemplateSandboxPool | None = None,
        make_validator: Callable[[TokenizerFiles, Tokenizer | None], GrammarValidator] = GrammarValidator,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens`: the model's context length. Texts that are far longer are refused before they are tokenized."""
        self.max_tokens = max_tokens
        self.prompt_tokenizer = PromptTokenizer(files)
        self._files = files
        self._sandboxes = sandboxes
        self._tokenizer = self.prompt_tokenizer.tokenizer
        self._table = self._tokenizer.table if self._tokenizer else TokenTable([])
        self.token_strings = TokenStrings(self._table)
        self._token_id_strings = TokenIdStrings(self._table)
        self.grammar_validator = make_validator(files, self._tokenizer)
        self.message_parsers = MessageParserFactory(
            files.chat_template, self._tokenizer, tool_call_parser, reasoning_parser
        )
        self._marked_table = with_visible_markers(self._table, self.message_parsers.markers)

    def token_strings_of(self, request: TextGenerationRequest) -> TokenStrings:
        """Returns how the logprobs of this request name tokens: by text or by id."""
        return self._token_id_strings if request.return_tokens_as_token_ids else self.token_strings

    def tokenize_chat(self, request: ChatCompletionRequest, created_s: int) -> list[int]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        return self.tokenize_messages(
            request.messages,
            template_options(request),
            request.chat_template,
            created_s,
            truncation=request.truncation,
        )

    def tokenize_messages(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions,
        template: str | None,
        created_s: int,
        *,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Returns the prompt tokens of chat messages. `template`: the client's own template, rendered in a sandbox;
        None: the model's. `truncation`: how the caller cuts the prompt's tokens; None: not at all."""
        renderer = None if template is None else self._sandboxed_renderer(template, created_s)
        return self.prompt_tokenizer.tokenize_chat(
            messages,
            created_s,
            options,
            renderer,
            self.max_tokens,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
        )

    def tokenize_completion(self, request: CompletionRequest) -> list[list[int]]:
        return [
            self.tokenize_prompt(prompt, request.prompt_path(index), truncation=request.truncation)
            for index, prompt in enumerate(request.prompts())
        ]

    def tokenize_prompt(self, prompt: str | list[int], path: str, *, truncation: Truncation | None = None) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return self.prompt_tokenizer.tokenize_text(prompt, self.max_tokens, truncation=truncation)
        except InvalidRequest as error:
            raise _with_field_path(error, path) from error

    def tokenize_text(self, text: str, path: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenizes a text that need not be a prompt, so it may be empty."""
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

    def new_text_stream(
        self, prepared: PreparedRequest, sampling: SamplingParams, include_stop: bool = False
    ) -> TextStream:
        return self._make_text_stream(self._table, prepared, sampling, include_stop)

    def new_text_stream_with_markers(
        self, prepared: PreparedRequest, sampling: SamplingParams, include_stop: bool = False
    ) -> TextStream:
        """Returns a text stream whose text includes the markers around calls and reasoning, for a parser."""
        return self._make_text_stream(self._marked_table, prepared, sampling, include_stop)

    def _make_text_stream(
        self, table: TokenTable, prepared: PreparedRequest, sampling: SamplingParams, include_stop: bool
    ) -> TextStream:
        stop, patterns = prepared.request.stop_strings(), prepared.stop_patterns
        if (stop or patterns) and self._tokenizer is None:
            raise field_error(
                "stop" if stop else "stop_regex",
                "this model has no tokenizer, so there is no text to find it in; use stop_token_ids",
            )
        return TextStream(
            table,
            tuple(stop),
            include_stop,
            end_token_ids=sampling.end_token_ids,
            min_tokens=sampling.min_tokens,
            stop_patterns=patterns,
        )


def _with_field_path(error: InvalidRequest, path: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {error.message.removeprefix('prompt: ')}", code=error.code, param=path)

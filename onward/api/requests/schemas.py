"""OpenAI's request bodies, and our own, as structs. `validation` checks which values are allowed."""

from typing import Any, ClassVar, Self

import msgspec

from onward.api.requests.structured_outputs import StructuredOutputFields
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.text.prompt_tokenizer import ChatMessage
from onward.text.truncation import Side, Truncation
from onward.web.openai_api.legacy_functions import FunctionChoice, resolve_tool_fields
from onward.web.openai_api.template_fields import ReasoningEffort
from onward.web.openai_api.tools import NO_TOOLS, FunctionDefinition, ResolvedTools, Tool, ToolChoice

CALL_REASONS = ("tool_calls", "function_call")
"""The finish reasons that a client gets for a choice that has stopped with calls."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """Accepted without effect: events are never padded."""


class SpeculativeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_draft_tokens: int | None = None
    """Maximum number of tokens to draft in one step, limited by the instance's own maximum. 0: no drafts."""


class GenerationRequest(StructuredOutputFields, frozen=True, kw_only=True):
    """Fields that all generating endpoints share."""

    has_default_limit: ClassVar[bool] = True
    """Whether `--default-max-tokens` limits the output if the request does not. False for chats: they end by themselves."""
    needs_full_output: ClassVar[bool] = False
    """Whether the response's events depend on all tokens, including those that an earlier attempt has sent."""
    model: str | None = None
    """Default: the model that is served, if it is the only one."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    generated_token_ids: list[int | list[int]] | None = None
    completion_token_ids: list[int | list[int]] | None = None
    """The same as `generated_token_ids`, by the name that responses use for these tokens."""
    generated_finish_reasons: list[str | None] | None = None
    """Finish reasons of an earlier response, one per choice. A choice that has ended there is not run again."""
    rescore_from: int | list[int] | None = None
    """A position of the output, or one per choice: the logprobs of the given tokens from there on are returned again."""
    speculative: SpeculativeOptions | None = None
    return_speculative_stats: bool | None = None
    """Whether the usage includes statistics about drafts."""

    @property
    def client_template(self) -> str | None:
        """The chat template that the client has sent in place of the model's. None: the model's is used."""
        return None

    @property
    def truncation(self) -> Truncation | None:
        """How longer prompts are cut. None: they are not cut."""
        return None

    @property
    def max_drafts(self) -> int | None:
        return None if self.speculative is None else self.speculative.num_draft_tokens

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_returned(self) -> int:
        """Number of choices of each prompt that the response includes."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Number of choices of each prompt that are generated."""
        return self.num_returned

    @property
    def num_choices(self) -> int:
        """Number of choices that are generated for all prompts. Choices are numbered prompt by prompt."""
        return self.num_prompts * self.num_candidates

    @property
    def selects_best(self) -> bool:
        """Whether more choices are generated than the response includes."""
        return self.num_candidates > self.num_returned

    @property
    def only_echoes(self) -> bool:
        """Whether the response has none of the generated tokens."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that `max_output_tokens` comes from, for errors."""
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each one; None: no logprobs."""
        return None

    @property
    def engine_logprobs(self) -> int | None:
        """Number of top logprobs that the engine reports for each token; None: no logprobs. With `selects_best` it reports
        them even if the response has none, since the best candidates are selected by them."""
        return 0 if self.num_logprobs is None and self.selects_best else self.num_logprobs

    @property
    def engine_prompt_logprobs(self) -> int | None:
        """Number of top logprobs that the engine reports for each prompt token; None: no logprobs."""
        return self.prompt_logprobs

    @property
    def echoes_prompt_logprobs(self) -> bool:
        """Whether every choice returns the prompt's logprobs in front of its own."""
        return False

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored and can be retrieved by its id after its end."""
        return False

    @property
    def is_background(self) -> bool:
        """Whether the response is generated although no connection waits for it."""
        return False

    @property
    def resumed_field(self) -> str:
        """The field in which the client has sent the tokens so far."""
        is_alias = self.generated_token_ids is None and self.completion_token_ids is not None
        return "completion_token_ids" if is_alias else "generated_token_ids"

    @property
    def resumed_tokens(self) -> list[int | list[int]] | None:
        """The tokens so far, from either of the two fields. None: the request starts from its prompt."""
        return getattr(self, self.resumed_field)

    def resolved_tools(self) -> ResolvedTools:
        return NO_TOOLS

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def stop_patterns(self) -> list[str]:
        """Returns the regular expressions whose match ends the output. SGLang's default is an empty one."""
        patterns = [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex or []
        return [pattern for pattern in patterns if pattern]

    def prior_token_ids(self) -> list[list[int]]:
        """Returns the tokens so far, one list per choice."""
        values = self.resumed_tokens or []
        if self.num_choices == 1:
            return [[item for item in values if isinstance(item, int)]]
        return [item for item in values if isinstance(item, list)] or [[] for _ in range(self.num_choices)]

    def prior_finish_reasons(self) -> list[str | None]:
        """Returns the finish reason of each choice in an earlier response; None for choices that are not complete."""
        finish_reasons = self.generated_finish_reasons or [None] * self.num_choices
        return [
            None if reason in INCOMPLETE_REASONS else "stop" if reason in CALL_REASONS else reason
            for reason in finish_reasons
        ]

    def rescore_positions(self) -> list[int | None]:
        """Returns the first position to be rescored for each choice; None if there is no token to rescore."""
        rescore_from = self.rescore_from
        starts = rescore_from if isinstance(rescore_from, list) else [rescore_from] * self.num_choices
        lengths = map(len, self.prior_token_ids())
        return [None if start == length else start for start, length in zip(starts, lengths, strict=True)]


WHAT_FITS = -1
"""The value of `truncate_prompt_tokens` that cuts a prompt to what fits into the context."""


class TextGenerationRequest(GenerationRequest, frozen=True, kw_only=True):
    """Fields of the endpoints whose responses are text."""

    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens by their ids, as `token_id:123`."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt is cut to this number of tokens. -1: to what leaves room for the requested output."""
    truncation_side: Side | None = None
    """The side that `truncate_prompt_tokens` cuts off. Default: left, so that the prompt's last tokens are kept."""

    @property
    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    @property
    def cuts_to_what_fits(self) -> bool:
        """Whether the prompt is cut to what leaves room for the requested output."""
        return self.truncate_prompt_tokens == WHAT_FITS

    def with_longest_prompt(self, max_prompt_tokens: int) -> Self:
        """Returns the request with the number of tokens that its prompt is cut to."""
        return msgspec.structs.replace(self, truncate_prompt_tokens=max_prompt_tokens)


class ChatCompletionRequest(TextGenerationRequest, frozen=True, kw_only=True):
    has_default_limit: ClassVar[bool] = False
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    """The prompt as token ids, in place of messages. Nothing is rendered."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of the assistant's message. Default: true, unless the last message is
    continued."""
    continue_final_message: bool | None = None
    """Whether the last message is left open, so that the output continues it."""
    chat_template: str | None = None
    """A chat template to use in place of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the chat template, which may use it."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    """The older form of tools. Answers then have a `function_call`."""
    function_call: FunctionChoice | None = None
    """The older form of `tool_choice`: `none`, `auto`, or an object with the name of a function."""
    echo: bool | None = None
    """Whether the answer begins with the text of the last message, if that is the assistant's."""
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens."""

    @property
    def client_template(self) -> str | None:
        return self.chat_template

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def resolved_tools(self) -> ResolvedTools:
        return resolve_tool_fields(self)

    def echoed_text(self) -> str:
        """Returns the text that the answer begins with."""
        last = self.messages[-1] if self.echo and self.messages else None
        # A client that sends tokens of an earlier response has the text already.
        if last is None or last.role != "assistant" or self.resumed_tokens is not None:
            return ""
        if isinstance(last.content, list):
            return "\n".join(part.text or "" for part in last.content)
        return last.content or ""


class CompletionRequest(TextGenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None
    """A text, its token ids, or a list of either."""
    prompt_token_ids: list[int | list[int]] | None = None
    """One prompt or several as token ids, in place of `prompt`."""
    max_tokens: int | None = None
    """Maximum number of generated tokens. 0 is allowed with `echo`: the response is the prompt."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    @property
    def num_candidates(self) -> int:
        return self.num_returned if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def engine_prompt_logprobs(self) -> int | None:
        if not self.echoes_prompt_logprobs:
            return self.prompt_logprobs
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    @property
    def only_echoes(self) -> bool:
        """Whether the response is the prompt alone. One token is computed, since the prompt's logprobs come with it, and
        the response leaves it out."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def max_output_tokens(self) -> int | None:
        return 1 if self.only_echoes else self.max_tokens

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.prompt_token_ids is None else "prompt_token_ids"

    @property
    def has_prompt_list(self) -> bool:
        """Whether the prompts are a list, even of one prompt. Errors then name the index of a prompt."""
        prompt = getattr(self, self.prompt_field)
        return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))

    def prompts(self) -> list[str | list[int]]:
        prompt = getattr(self, self.prompt_field)
        return prompt if self.has_prompt_list else [prompt]

    def prompt_path(self, index: int) -> str:
        return f"{self.prompt_field}[{index}]" if self.has_prompt_list else self.prompt_field


class GenerateRequest(GenerationRequest, frozen=True, kw_only=True):
    """The request of `/v1/generate`, an endpoint of our own: token ids in, token ids out."""

    prompt_token_ids: list[int]
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ValidationContext(msgspec.Struct, frozen=True):
    """Properties of the model and the server that requests are checked against."""

    model: str
    vocab_size: int
    max_choices: int
    """Maximum number of choices of one prompt."""
    allows_client_templates: bool = False
    """Whether a request may have a chat template of its own."""
    model_aliases: tuple[str, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which requests may address the model."""
        return (self.model, *self.model_aliases)

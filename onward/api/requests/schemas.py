"""OpenAI's requests, and ours, as structs: what was asked for. What values are allowed, `request_checks` says."""

from typing import Any, ClassVar

import msgspec

from onward.api.requests.structured_outputs import StructuredOutputFields
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.text.prompt_tokenizer import ChatMessage
from onward.web.openai_api.template_fields import ReasoningEffort
from onward.web.openai_api.tools import NO_TOOLS, ResolvedTools, Tool, ToolChoice, resolve_tools

TOOL_CALLS_REASON = "tool_calls"
"""What a client is told where an answer has stopped with calls."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: each chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """Nothing is padded here, whatever it says."""


class SpeculativeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_draft_tokens: int | None = None
    """How many tokens a step may guess, at most, and no more than the instance does. 0: none."""


class GenerationRequest(StructuredOutputFields, frozen=True, kw_only=True):
    """What the endpoints that generate share."""

    has_default_limit: ClassVar[bool] = True
    """Whether `--default-max-tokens` limits the output where the request does not; chats end by themselves."""
    needs_full_output: ClassVar[bool] = False
    """The answer's form is a function of all of its tokens, also of those that an earlier attempt has told."""
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    generated_token_ids: list[int | list[int]] | None = None
    completion_token_ids: list[int | list[int]] | None = None
    """The same as `generated_token_ids`, by the name that answers give these tokens."""
    generated_finish_reasons: list[str | None] | None = None
    """Of an earlier answer, one per choice: a choice that has ended there is not run again."""
    rescore_from: int | list[int] | None = None
    """A position of the output, or one per choice: from there on the given tokens' logprobs are told again."""
    speculative: SpeculativeOptions | None = None
    return_speculative_stats: bool | None = None
    """Whether the usage tells what became of the drafts."""

    @property
    def client_template(self) -> str | None:
        """The client's, instead of the model's."""
        return None

    @property
    def max_drafts(self) -> int | None:
        return None if self.speculative is None else self.speculative.num_draft_tokens

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_returned(self) -> int:
        """Choices of each prompt that the answer has."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Choices of each prompt that are made."""
        return self.num_returned

    @property
    def num_choices(self) -> int:
        """All that are made: the candidates of the first prompt, then those of the second, and so on."""
        return self.num_prompts * self.num_candidates

    @property
    def selects_best(self) -> bool:
        """Some of what is made is not told."""
        return self.num_candidates > self.num_returned

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """Where that was said."""
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each one; None: no logprobs."""
        return None

    @property
    def engine_logprobs(self) -> int | None:
        """What the engine reports for each token, told or not: the best are chosen by it."""
        return 0 if self.num_logprobs is None and self.selects_best else self.num_logprobs

    @property
    def engine_prompt_logprobs(self) -> int | None:
        """What the engine reports for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def echoes_prompt_logprobs(self) -> bool:
        """Every choice tells them, before its own."""
        return False

    @property
    def is_stored(self) -> bool:
        """The answer can be asked for by its id, long after its end."""
        return False

    @property
    def is_background(self) -> bool:
        """It is made although nobody waits for it."""
        return False

    @property
    def resumed_field(self) -> str:
        """The name by which the client sent the tokens so far."""
        is_alias = self.generated_token_ids is None and self.completion_token_ids is not None
        return "completion_token_ids" if is_alias else "generated_token_ids"

    @property
    def resumed_tokens(self) -> list[int | list[int]] | None:
        """The tokens so far, by whichever name they were sent. None: the request starts from its prompt."""
        return getattr(self, self.resumed_field)

    def resolved_tools(self) -> ResolvedTools:
        return NO_TOOLS

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def prior_token_ids(self) -> list[list[int]]:
        """The tokens so far, one list per choice."""
        values = self.resumed_tokens or []
        if self.num_choices == 1:
            return [[item for item in values if isinstance(item, int)]]
        return [item for item in values if isinstance(item, list)] or [[] for _ in range(self.num_choices)]

    def prior_finish_reasons(self) -> list[str | None]:
        """How each choice has ended in an earlier answer, if it has."""
        finish_reasons = self.generated_finish_reasons or [None] * self.num_choices
        return [
            None if reason in INCOMPLETE_REASONS else "stop" if reason == TOOL_CALLS_REASON else reason
            for reason in finish_reasons
        ]

    def rescore_positions(self) -> list[int | None]:
        """For each choice the first position to be scored again, if there is one."""
        rescore_from = self.rescore_from
        starts = rescore_from if isinstance(rescore_from, list) else [rescore_from] * self.num_choices
        lengths = map(len, self.prior_token_ids())
        return [None if start == length else start for start, length in zip(starts, lengths, strict=True)]


class TextGenerationRequest(GenerationRequest, frozen=True, kw_only=True):
    """What those share that are answered by text."""

    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None


class ChatCompletionRequest(TextGenerationRequest, frozen=True, kw_only=True):
    has_default_limit: ClassVar[bool] = False
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    """Instead of messages: nothing is rendered."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of the assistant's message. By default it does, unless the last message
    is continued."""
    continue_final_message: bool | None = None
    """The last message is left open, and the answer goes on with it."""
    chat_template: str | None = None
    """Instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """A name for the template, which may read it."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget: int | None = None
    """Tokens that the model may think for."""

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
        return resolve_tools(self.tools, self.tool_choice, self.parallel_tool_calls)


class CompletionRequest(TextGenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None
    """A text, its token ids, or a list of either."""
    prompt_token_ids: list[int | list[int]] | None = None
    """Instead of a prompt: one, or several."""
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
        return self.logprobs if self.echoes_prompt_logprobs else self.prompt_logprobs

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.prompt_token_ids is None else "prompt_token_ids"

    @property
    def has_prompt_list(self) -> bool:
        """Be it a single one: what is wrong with it has a place in the list."""
        prompt = getattr(self, self.prompt_field)
        return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))

    def prompts(self) -> list[str | list[int]]:
        prompt = getattr(self, self.prompt_field)
        return prompt if self.has_prompt_list else [prompt]

    def prompt_path(self, index: int) -> str:
        return f"{self.prompt_field}[{index}]" if self.has_prompt_list else self.prompt_field


class GenerateRequest(GenerationRequest, frozen=True, kw_only=True):
    """Our own: token ids in, token ids out."""

    prompt_token_ids: list[int]
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ValidationContext(msgspec.Struct, frozen=True):
    """What the server's own configuration says about requests."""

    model: str
    vocab_size: int
    max_choices: int
    """Of one prompt."""
    allows_client_templates: bool = False
    """Whether a request may bring its own."""

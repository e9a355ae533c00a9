"""Token ids of prompts that come as text or as chats: made once, for choosing by cached prefixes, and passed on.

A request of which no ids can be made goes on as it came: the instance makes them, or says in its own words what is wrong.
Exists only where a policy is `prefix`.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from onward.errors import OnwardError, Overloaded
from onward.obs.metrics import Registry
from onward.router.client_stream import ClientRequest
from onward.router.stream_runner import StreamRunner
from onward.router.tokenizer_fetcher import TokenizerFetcher
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer
from onward.web.fair_executor import FairExecutor
from onward.web.fair_scheduler import FairSchedulerLimits
from onward.web.openai_api import response_ids
from onward.web.openai_api.response_items import items_to_messages, to_chat_tool_choice, to_chat_tools
from onward.web.openai_api.template_fields import ChatTemplateFields, ReasoningEffort, template_options
from onward.web.openai_api.tools import check_tool_messages

MAX_INLINE_BYTES = 4 << 10
"""A longer body, of a millisecond or more, must not hold up everybody's tokens: it goes to a thread."""
TOKENIZE_QUEUE_BOUNDS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=64, waiting_per_caller=16, bytes_per_caller=32 << 20
)
"""Of longer bodies. Beyond, the instances share the work."""
CPU_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
REFUSED, BUSY = "refused", "busy"

_logger = logging.getLogger(__name__)


class _ChatPrompt(ChatTemplateFields, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    chat_template: None = None
    """One that a client brings is for the instance to render, if it does."""


class _CompletionPrompt(msgspec.Struct, frozen=True):
    prompt: str
    """One: several are made by the instance."""


class _Reasoning(msgspec.Struct, frozen=True):
    effort: ReasoningEffort | None = None


class _ResponsePrompt(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Any]
    instructions: str | None = None
    reasoning: _Reasoning | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    onward_context: list[Any] | None = None


_responses = msgspec.json.Decoder(_ResponsePrompt)
_chats = msgspec.json.Decoder(_ChatPrompt)
_completions = msgspec.json.Decoder(_CompletionPrompt)


def _tokenize_chat(tokens: PromptTokenizer, origin: ClientRequest, max_tokens: int | None) -> list[int]:
    chat = _chats.decode(origin.body)
    check_tool_messages(chat.messages)
    return tokens.tokenize_chat(chat.messages, origin.created_s, template_options(chat), max_tokens=max_tokens)


def _tokenize_completion(tokens: PromptTokenizer, origin: ClientRequest, max_tokens: int | None) -> list[int]:
    return tokens.tokenize_text(_completions.decode(origin.body).prompt, max_tokens)


def _tokenize_response(tokens: PromptTokenizer, origin: ClientRequest, max_tokens: int | None) -> list[int]:
    asked = _responses.decode(origin.body)
    fields = ChatTemplateFields(
        chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=asked.reasoning and asked.reasoning.effort,
        tools=to_chat_tools(asked.tools),
        tool_choice=to_chat_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
    )
    messages = items_to_messages(asked.onward_context or [], asked.input, asked.instructions)
    return tokens.tokenize_chat(messages, origin.created_s, template_options(fields), max_tokens=max_tokens)


_Make = Callable[[PromptTokenizer, ClientRequest, int | None], list[int]]
_TOKENIZE_BY_PATH: dict[str, _Make] = {
    "/v1/chat/completions": _tokenize_chat,
    "/v1/completions": _tokenize_completion,
    response_ids.PATH: _tokenize_response,
}


class RoutingTokenizer:
    def __init__(self, serving: StreamRunner, registry: Registry, threads: Executor | None = None) -> None:
        self._serving = serving
        threads = threads or ThreadPoolExecutor(TOKENIZE_QUEUE_BOUNDS.running, thread_name_prefix="tokenizing")
        self._texts = FairExecutor(threads, TOKENIZE_QUEUE_BOUNDS, serving.clock, "texts")
        self.source = TokenizerFetcher(serving, threads)
        self.tokenize_seconds = registry.histogram(
            "onward_router_tokenize_seconds", "Processor time of making a prompt's token ids", CPU_BOUNDS_S
        )
        self.untokenized = registry.counter(
            "onward_router_untokenized_total", "Prompts that were passed on as they came, by why", ["reason"]
        )

    async def add_token_ids(self, origin: ClientRequest) -> ClientRequest:
        make = _TOKENIZE_BY_PATH.get(origin.path)
        if make is None or origin.routing_token_ids is not None:
            return origin
        agreed = await self.source.current()
        if isinstance(agreed, str):
            self.untokenized.inc(agreed)
            return origin
        token_ids = await self._tokenize(make, agreed.tokens, origin)
        if token_ids is None:
            return origin
        return replace(origin, prompt_token_ids=token_ids, routing_token_ids=token_ids, tokenizer_hash=agreed.text_hash)

    def _max_tokens(self) -> int | None:
        """The largest context of all instances. None: not all have told theirs."""
        contexts = [one.max_tokens for one in self._serving.core.serving_instances(self._serving.clock.now_s())]
        return max(contexts) if contexts and all(contexts) else None

    async def _tokenize(self, make: _Make, tokens: PromptTokenizer, origin: ClientRequest) -> list[int] | None:
        if len(origin.body) <= MAX_INLINE_BYTES:
            token_ids, cpu_s = _timed(make, tokens, origin, self._max_tokens())
        else:
            max_tokens = self._max_tokens()
            try:
                token_ids, cpu_s = await self._texts.run(
                    origin.caller, lambda: _timed(make, tokens, origin, max_tokens), len(origin.body)
                )
            except Overloaded:
                self.untokenized.inc(BUSY)
                return None
        self.tokenize_seconds.observe(cpu_s)
        if token_ids is None:
            self.untokenized.inc(REFUSED)
        return token_ids


def _timed(
    make: _Make, tokens: PromptTokenizer, origin: ClientRequest, max_tokens: int | None
) -> tuple[list[int] | None, float]:
    """The ids, if it has any, and the processor time that it took."""
    began_s = time.thread_time()
    try:
        token_ids = make(tokens, origin, max_tokens)
    except (OnwardError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        token_ids = None
    except Exception:
        _logger.exception("a prompt could not be tokenized by a fault of ours")
        token_ids = None
    return token_ids, time.thread_time() - began_s

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

from onward import log
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


def _tokenize_chat(tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None) -> list[int]:
    chat = _chats.decode(client_request.body)
    check_tool_messages(chat.messages)
    return tokenizer.tokenize_chat(
        chat.messages, client_request.created_s, template_options(chat), max_tokens=max_tokens
    )


def _tokenize_completion(
    tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None
) -> list[int]:
    return tokenizer.tokenize_text(_completions.decode(client_request.body).prompt, max_tokens)


def _tokenize_response(tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None) -> list[int]:
    request_fields = _responses.decode(client_request.body)
    fields = ChatTemplateFields(
        chat_template_kwargs=request_fields.chat_template_kwargs,
        reasoning_effort=request_fields.reasoning and request_fields.reasoning.effort,
        tools=to_chat_tools(request_fields.tools),
        tool_choice=to_chat_tool_choice(request_fields.tool_choice),
        parallel_tool_calls=request_fields.parallel_tool_calls,
    )
    messages = items_to_messages(request_fields.onward_context or [], request_fields.input, request_fields.instructions)
    return tokenizer.tokenize_chat(messages, client_request.created_s, template_options(fields), max_tokens=max_tokens)


_Make = Callable[[PromptTokenizer, ClientRequest, int | None], list[int]]
_TOKENIZE_BY_PATH: dict[str, _Make] = {
    "/v1/chat/completions": _tokenize_chat,
    "/v1/completions": _tokenize_completion,
    response_ids.PATH: _tokenize_response,
}


class RoutingTokenizer:
    def __init__(self, runner: StreamRunner, registry: Registry, threads: Executor | None = None) -> None:
        self._runner = runner
        threads = threads or ThreadPoolExecutor(TOKENIZE_QUEUE_BOUNDS.running, thread_name_prefix="tokenizing")
        self._texts = FairExecutor(threads, TOKENIZE_QUEUE_BOUNDS, runner.clock, "texts")
        self.source = TokenizerFetcher(runner, threads)
        self.tokenize_seconds = registry.histogram(
            "onward_router_tokenize_seconds", "Processor time of making a prompt's token ids", CPU_BOUNDS_S
        )
        self.untokenized = registry.counter(
            "onward_router_untokenized_total", "Prompts that were passed on as they came, by why", ["reason"]
        )

    async def add_token_ids(self, client_request: ClientRequest) -> ClientRequest:
        tokenize = _TOKENIZE_BY_PATH.get(client_request.path)
        if tokenize is None or client_request.routing_token_ids is not None:
            return client_request
        agreed = await self.source.current()
        if isinstance(agreed, str):
            self.untokenized.inc(agreed)
            return client_request
        token_ids = await self._tokenize(tokenize, agreed.tokens, client_request)
        if token_ids is None:
            return client_request
        assert client_request.prompt_token_ids is None, "the token ids of a request are made once"
        return replace(
            client_request, prompt_token_ids=token_ids, routing_token_ids=token_ids, tokenizer_hash=agreed.text_hash
        )

    def _max_tokens(self) -> int | None:
        """The largest context of all instances. None: not all have told theirs."""
        contexts = [instance.max_tokens for instance in self._runner.core.serving_instances(self._runner.clock.now_s())]
        return max(contexts) if contexts and all(contexts) else None

    async def _tokenize(
        self, tokenize: _Make, tokenizer: PromptTokenizer, client_request: ClientRequest
    ) -> list[int] | None:
        if len(client_request.body) <= MAX_INLINE_BYTES:
            token_ids, cpu_s = _timed(tokenize, tokenizer, client_request, self._max_tokens())
        else:
            max_tokens = self._max_tokens()
            try:
                token_ids, cpu_s = await self._texts.run(
                    client_request.caller,
                    lambda: _timed(tokenize, tokenizer, client_request, max_tokens),
                    len(client_request.body),
                )
            except Overloaded:
                self.untokenized.inc(BUSY)
                return None
        self.tokenize_seconds.observe(cpu_s)
        if token_ids is None:
            self.untokenized.inc(REFUSED)
        return token_ids


def _timed(
    tokenize: _Make, tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None
) -> tuple[list[int] | None, float]:
    """The ids, if it has any, and the processor time that it took."""
    began_s = time.thread_time()
    try:
        token_ids = tokenize(tokenizer, client_request, max_tokens)
    except (OnwardError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        token_ids = None
    except Exception:
        fields = log.request_fields(client_request.request_id, client_request.client_request_id)
        _logger.exception(log.event("a prompt could not be tokenized by a fault of ours", **fields))
        token_ids = None
    return token_ids, time.thread_time() - began_s

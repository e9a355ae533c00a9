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
from onward.router.serving import Serving
from onward.router.stream import Origin
from onward.router.tokenizer_source import TokenizerSource
from onward.text.prompt_tokens import ChatMessage, PromptTokens
from onward.web import response_ids
from onward.web.fair_order import QueueBounds
from onward.web.fair_queue import FairQueue
from onward.web.response_items import messages_of, tool_choice_of, tools_of
from onward.web.template_fields import ChatFields, ReasoningEffort, rendering_of
from onward.web.tooling import check_tool_messages

MAX_INLINE_BYTES = 4 << 10
"""A longer body, of a millisecond or more, must not hold up everybody's tokens: it goes to a thread."""
TEXTS = QueueBounds(running=2, running_per_caller=1, waiting=64, waiting_per_caller=16, bytes_per_caller=32 << 20)
"""Of longer bodies. Beyond, the instances share the work."""
CPU_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
REFUSED, BUSY = "refused", "busy"

_logger = logging.getLogger(__name__)


class _Chat(ChatFields, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    chat_template: None = None
    """One that a client brings is for the instance to render, if it does."""


class _Completion(msgspec.Struct, frozen=True):
    prompt: str
    """One: several are made by the instance."""


class _Reasoning(msgspec.Struct, frozen=True):
    effort: ReasoningEffort | None = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Any]
    instructions: str | None = None
    reasoning: _Reasoning | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    onward_context: list[Any] | None = None


_responses = msgspec.json.Decoder(_Response)
_chats = msgspec.json.Decoder(_Chat)
_completions = msgspec.json.Decoder(_Completion)


def _of_chat(tokens: PromptTokens, origin: Origin, max_tokens: int | None) -> list[int]:
    chat = _chats.decode(origin.body)
    check_tool_messages(chat.messages)
    return tokens.of_chat(chat.messages, origin.created_s, rendering_of(chat), max_tokens=max_tokens)


def _of_completion(tokens: PromptTokens, origin: Origin, max_tokens: int | None) -> list[int]:
    return tokens.of_text(_completions.decode(origin.body).prompt, max_tokens)


def _of_response(tokens: PromptTokens, origin: Origin, max_tokens: int | None) -> list[int]:
    asked = _responses.decode(origin.body)
    fields = ChatFields(
        chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=asked.reasoning and asked.reasoning.effort,
        tools=tools_of(asked.tools),
        tool_choice=tool_choice_of(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
    )
    messages = messages_of(asked.onward_context or [], asked.input, asked.instructions)
    return tokens.of_chat(messages, origin.created_s, rendering_of(fields), max_tokens=max_tokens)


_Make = Callable[[PromptTokens, Origin, int | None], list[int]]
_MAKERS: dict[str, _Make] = {
    "/v1/chat/completions": _of_chat,
    "/v1/completions": _of_completion,
    response_ids.PATH: _of_response,
}


class Tokenizing:
    def __init__(self, serving: Serving, registry: Registry, threads: Executor | None = None) -> None:
        self._serving = serving
        threads = threads or ThreadPoolExecutor(TEXTS.running, thread_name_prefix="tokenizing")
        self._texts = FairQueue(threads, TEXTS, serving.clock, "texts")
        self.source = TokenizerSource(serving, threads)
        self.cpu = registry.histogram(
            "onward_router_tokenize_seconds", "Processor time of making a prompt's token ids", CPU_BOUNDS_S
        )
        self.untokenized = registry.counter(
            "onward_router_untokenized_total", "Prompts that were passed on as they came, by why", ["reason"]
        )

    async def with_ids(self, origin: Origin) -> Origin:
        make = _MAKERS.get(origin.path)
        if make is None or origin.known_prompt is not None:
            return origin
        agreed = await self.source.current()
        if isinstance(agreed, str):
            self.untokenized.inc(agreed)
            return origin
        token_ids = await self._made(make, agreed.tokens, origin)
        if token_ids is None:
            return origin
        return replace(origin, prompt_token_ids=token_ids, known_prompt=token_ids, text_hash=agreed.text_hash)

    def _max_tokens(self) -> int | None:
        """The largest context of all instances. None: not all have told theirs."""
        contexts = [one.max_tokens for one in self._serving.core.takers(self._serving.clock.now_s())]
        return max(contexts) if contexts and all(contexts) else None

    async def _made(self, make: _Make, tokens: PromptTokens, origin: Origin) -> list[int] | None:
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
        self.cpu.observe(cpu_s)
        if token_ids is None:
            self.untokenized.inc(REFUSED)
        return token_ids


def _timed(make: _Make, tokens: PromptTokens, origin: Origin, max_tokens: int | None) -> tuple[list[int] | None, float]:
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

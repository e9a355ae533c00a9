"""Token ids of prompts that come as text or as chats: made once, for choosing by cached prefixes, and passed on.

A request of which no ids can be made goes on as it came: the instance makes them, or says in its own words what is wrong.
Exists only where a policy is `prefix`.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import msgspec

from onward import log
from onward.errors import OnwardError, Overloaded
from onward.obs.metrics import Registry
from onward.router.client_stream import ClientRequest
from onward.router.stream_runner import StreamRunner
from onward.router.tokenizer_fetcher import MISSING, TokenizerFetcher
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer
from onward.text.truncation import Side, Truncation
from onward.web.anthropic_api import message_paths
from onward.web.anthropic_api.message_prompt import MessagePromptFields, chat_messages, chat_template_fields
from onward.web.fair_executor import FairExecutor
from onward.web.fair_scheduler import FairSchedulerLimits
from onward.web.json_body import field_error
from onward.web.openai_api import response_ids
from onward.web.openai_api.response_prompt import ResponsePromptFields, prompt_messages, prompt_template_fields
from onward.web.openai_api.template_fields import ChatTemplateFields, template_options
from onward.web.openai_api.tools import check_tool_messages

MAX_INLINE_BYTES = 4 << 10
"""A longer body, of a millisecond or more, must not delay the tokens of other streams, so a thread tokenizes it."""
TOKENIZE_QUEUE_BOUNDS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=64, waiting_per_caller=16, bytes_per_caller=32 << 20
)
"""Limits for longer bodies. Beyond them, the instances tokenize."""
CPU_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
REFUSED, BUSY = "refused", "busy"

_logger = logging.getLogger(__name__)


class _ChatPrompt(ChatTemplateFields, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    chat_template: None = None
    """A template in the request is not rendered here; the instance renders it, if it is allowed to."""


class _CompletionPrompt(msgspec.Struct, frozen=True):
    prompt: str
    """A single prompt; the instance tokenizes lists of prompts."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None


_responses = msgspec.json.Decoder(ResponsePromptFields)
_messages = msgspec.json.Decoder(MessagePromptFields)
_chats = msgspec.json.Decoder(_ChatPrompt)
_completions = msgspec.json.Decoder(_CompletionPrompt)


def _tokenize_chat(tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None) -> list[int]:
    chat = _chats.decode(client_request.body)
    check_tool_messages(chat.messages)
    truncation = _truncation(chat)
    token_ids = tokenizer.tokenize_chat(
        chat.messages,
        client_request.created_s,
        template_options(chat),
        max_tokens=max_tokens,
        truncation=truncation,
    )
    return token_ids if truncation is None else truncation.cut(token_ids)


def _tokenize_completion(
    tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None
) -> list[int]:
    completion = _completions.decode(client_request.body)
    truncation = _truncation(completion)
    token_ids = tokenizer.tokenize_text(completion.prompt, max_tokens, truncation=truncation)
    return token_ids if truncation is None else truncation.cut(token_ids)


def _truncation(fields: _ChatPrompt | _CompletionPrompt) -> Truncation | None:
    """Raises `InvalidRequest` for -1: what a prompt is cut to depends on the instance, which then tokenizes."""
    num_tokens = fields.truncate_prompt_tokens
    if num_tokens is None:
        return None
    if num_tokens < 1:
        raise field_error("truncate_prompt_tokens", "is no number of tokens")
    return Truncation(num_tokens, fields.truncation_side or "left")


def _tokenize_response(tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None) -> list[int]:
    fields = _responses.decode(client_request.body)
    options = template_options(prompt_template_fields(fields))
    return tokenizer.tokenize_chat(prompt_messages(fields), client_request.created_s, options, max_tokens=max_tokens)


def _tokenize_message(tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None) -> list[int]:
    fields = _messages.decode(client_request.body)
    options = template_options(chat_template_fields(fields))
    return tokenizer.tokenize_chat(chat_messages(fields), client_request.created_s, options, max_tokens=max_tokens)


_Make = Callable[[PromptTokenizer, ClientRequest, int | None], list[int]]
_TOKENIZE_BY_PATH: dict[str, _Make] = {
    "/v1/chat/completions": _tokenize_chat,
    "/v1/completions": _tokenize_completion,
    response_ids.PATH: _tokenize_response,
    message_paths.PATH: _tokenize_message,
}


class RoutingTokenizer:
    def __init__(self, runner: StreamRunner, registry: Registry, threads: Executor | None = None) -> None:
        self._runner = runner
        threads = threads or ThreadPoolExecutor(TOKENIZE_QUEUE_BOUNDS.running, thread_name_prefix="tokenizing")
        self._texts = FairExecutor(threads, TOKENIZE_QUEUE_BOUNDS, runner.clock, "texts")
        self.source = TokenizerFetcher(runner, threads)
        self.tokenize_seconds = registry.histogram(
            "onward_router_tokenize_seconds", "Processor time of rendering and tokenizing a prompt", CPU_BOUNDS_S
        )
        self.untokenized = registry.counter(
            "onward_router_untokenized_total", "Prompts forwarded as text instead of token ids, by reason", ["reason"]
        )

    async def add_token_ids(self, client_request: ClientRequest) -> ClientRequest:
        tokenize = _TOKENIZE_BY_PATH.get(client_request.path)
        if tokenize is None or client_request.routing_token_ids is not None:
            return client_request
        model = self._model_of(client_request)
        agreed = MISSING if model is None else await self.source.current(model)
        if isinstance(agreed, str):
            self.untokenized.inc(agreed)
            return client_request
        token_ids = await self._tokenize(tokenize, agreed.tokens, client_request, self._max_tokens(model))
        if token_ids is None:
            return client_request
        assert client_request.prompt_token_ids is None, "the token ids of a request are made once"
        return replace(
            client_request, prompt_token_ids=token_ids, routing_token_ids=token_ids, tokenizer_hash=agreed.text_hash
        )

    def _model_of(self, client_request: ClientRequest) -> str | None:
        """Returns the model that gets the request unless its instances are lost first; None if it is not known."""
        try:
            return self._runner.core.models.for_request(client_request, self._runner.clock.now_s())
        except OnwardError:
            return None  # the stream that is about to begin says so

    def _max_tokens(self, model: str | None) -> int | None:
        """Returns the largest context of the model's instances; None if one of them has not announced its own."""
        instances = self._runner.core.serving_instances(self._runner.clock.now_s(), model)
        contexts = [instance.max_tokens for instance in instances]
        return max(contexts) if contexts and all(contexts) else None

    async def _tokenize(
        self, tokenize: _Make, tokenizer: PromptTokenizer, client_request: ClientRequest, max_tokens: int | None
    ) -> list[int] | None:
        if len(client_request.body) <= MAX_INLINE_BYTES:
            token_ids, cpu_s = _timed(tokenize, tokenizer, client_request, max_tokens)
        else:
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
    """Tokenizes a prompt and returns its token ids with the processor time spent. The ids are None if the prompt cannot
    be tokenized."""
    began_s = time.thread_time()
    try:
        token_ids = tokenize(tokenizer, client_request, max_tokens)
    except (OnwardError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        token_ids = None
    except Exception:
        fields = log.request_fields(client_request.request_id, client_request.client_request_id)
        _logger.exception(log.event("a prompt could not be tokenized because of an internal error", **fields))
        token_ids = None
    return token_ids, time.thread_time() - began_s

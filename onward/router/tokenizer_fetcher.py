"""The instances' tokenizer and chat template, had from them: whether they agree on one, and whether it is here.

Each instance names its own by a hash when it registers. Where all that take requests name the same one, one of them is
asked for it, once. So a router needs no model's files, and can make no ids that an instance would have made otherwise.
"""

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from onward import log
from onward.errors import StartupError
from onward.proto.model import TokenizerFiles
from onward.router.stream_runner import StreamRunner
from onward.text.prompt_tokenizer import PromptTokenizer, tokenizer_hash

MAX_ASKED = 3
"""Instances that are asked at a time."""
FETCH_RETRY_S = 5.0
MAX_WAIT_S = 2.0
"""For a tokenizer that is on its way."""
MISSING, DIFFERS = "missing", "differs"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedTokenizer:
    text_hash: str
    tokens: PromptTokenizer


class TokenizerFetcher:
    def __init__(self, serving: StreamRunner, threads: Executor) -> None:
        self._serving = serving
        self._threads = threads
        self._loaded: FetchedTokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._asked_for = ""
        self._not_before_s = 0.0
        self._told = ""

    async def current(self) -> FetchedTokenizer | str:
        """The tokenizer that all instances have; or why there is none."""
        named = self._announced_hashes()
        self._refresh(named)
        if self._loading is not None:
            await asyncio.wait((self._loading,), timeout=MAX_WAIT_S)
        if len(named) > 1:
            return DIFFERS
        if self._loaded is None or {self._loaded.text_hash} != named:
            return MISSING
        return self._loaded

    def refresh(self) -> None:
        """An instance may have come: has its tokenizer fetched, before a request needs it."""
        self._refresh(self._announced_hashes())

    def _announced_hashes(self) -> set[str]:
        return {replica.tokenizer_hash for replica in self._serving.core.serving_instances(self._serving.clock.now_s())}

    def _refresh(self, named: set[str]) -> None:
        if len(named) > 1:
            self._log_once("the instances have different tokenizers or chat templates")
        wanted = next(iter(named)) if len(named) == 1 else ""
        if not wanted:
            return
        if self._loaded is not None and self._loaded.text_hash == wanted:
            self._told = ""
            return
        now_s = self._serving.clock.now_s()
        is_too_soon = wanted == self._asked_for and now_s < self._not_before_s
        if self._loading is None and not is_too_soon:
            self._asked_for, self._not_before_s = wanted, now_s + FETCH_RETRY_S
            self._loading = asyncio.create_task(self._load(wanted))

    async def _load(self, wanted: str) -> None:
        try:
            text = await self._fetch(wanted)
            if text is None:
                self._log_once("no instance could be asked for its tokenizer")
                return
            loop = asyncio.get_running_loop()
            self._loaded = FetchedTokenizer(wanted, await loop.run_in_executor(self._threads, PromptTokenizer, text))
            _logger.info(log.event("tokenizer loaded", hash=wanted))
        except StartupError as fault:
            self._log_once(fault.message)
        finally:
            self._loading = None

    async def _fetch(self, wanted: str) -> TokenizerFiles | None:
        """What is not as it was announced is not taken: a proof covers announcements, not answers."""
        takers = self._serving.core.serving_instances(self._serving.clock.now_s())
        for replica in [one for one in takers if one.tokenizer_hash == wanted][:MAX_ASKED]:
            text = await self._serving.upstream.fetch_tokenizer(replica.url)
            if text is not None and tokenizer_hash(text) == wanted:
                return text
        return None

    def _log_once(self, problem: str) -> None:
        """One line when it begins; it is counted for each request."""
        if problem != self._told:
            self._told = problem
            _logger.warning(log.event("texts are not tokenized here, and are sent by load", cause=problem))

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
    def __init__(self, runner: StreamRunner, threads: Executor) -> None:
        self._runner = runner
        self._threads = threads
        self._loaded: FetchedTokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._requested_hash = ""
        self._next_fetch_s = 0.0
        self._logged_problem = ""

    async def current(self) -> FetchedTokenizer | str:
        """The tokenizer that all instances have; or why there is none."""
        hashes = self._announced_hashes()
        self._refresh(hashes)
        if self._loading is not None:
            await asyncio.wait((self._loading,), timeout=MAX_WAIT_S)
        if len(hashes) > 1:
            return DIFFERS
        if self._loaded is None or {self._loaded.text_hash} != hashes:
            return MISSING
        return self._loaded

    def refresh(self) -> None:
        """An instance may have come: has its tokenizer fetched, before a request needs it."""
        self._refresh(self._announced_hashes())

    def _announced_hashes(self) -> set[str]:
        return {instance.tokenizer_hash for instance in self._runner.core.serving_instances(self._runner.clock.now_s())}

    def _refresh(self, hashes: set[str]) -> None:
        if len(hashes) > 1:
            self._log_once("the instances have different tokenizers or chat templates")
        wanted_hash = next(iter(hashes)) if len(hashes) == 1 else ""
        if not wanted_hash:
            return
        if self._loaded is not None and self._loaded.text_hash == wanted_hash:
            self._logged_problem = ""
            return
        now_s = self._runner.clock.now_s()
        is_too_soon = wanted_hash == self._requested_hash and now_s < self._next_fetch_s
        if self._loading is None and not is_too_soon:
            self._requested_hash, self._next_fetch_s = wanted_hash, now_s + FETCH_RETRY_S
            self._loading = asyncio.create_task(self._load(wanted_hash))

    async def _load(self, wanted_hash: str) -> None:
        assert wanted_hash, "a tokenizer is fetched by its hash"
        try:
            files = await self._fetch(wanted_hash)
            if files is None:
                self._log_once("no instance could be asked for its tokenizer")
                return
            loop = asyncio.get_running_loop()
            self._loaded = FetchedTokenizer(
                wanted_hash, await loop.run_in_executor(self._threads, PromptTokenizer, files)
            )
            _logger.info(log.event("tokenizer loaded", hash=wanted_hash))
        except StartupError as fault:
            self._log_once(fault.message)
        finally:
            self._loading = None

    async def _fetch(self, wanted_hash: str) -> TokenizerFiles | None:
        """What is not as it was announced is not taken: a proof covers announcements, not answers."""
        instances = self._runner.core.serving_instances(self._runner.clock.now_s())
        for instance in [candidate for candidate in instances if candidate.tokenizer_hash == wanted_hash][:MAX_ASKED]:
            files = await self._runner.upstream.fetch_tokenizer(instance.url)
            if files is not None and tokenizer_hash(files) == wanted_hash:
                return files
        return None

    def _log_once(self, problem: str) -> None:
        """One line when it begins; it is counted for each request."""
        if problem != self._logged_problem:
            self._logged_problem = problem
            _logger.warning(log.event("texts are not tokenized here, and are sent by load", cause=problem))

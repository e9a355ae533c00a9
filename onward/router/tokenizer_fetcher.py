"""Tokenizers and chat templates of models, fetched from instances: whether those of a model agree on one, and whether it is
here.

Each instance names its own by a hash when it registers. Where all of a model that take requests name the same one, one of
them is asked for it, once. So a router needs no model's files, and can make no ids that an instance would have made
otherwise.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from concurrent.futures import Executor
from dataclasses import dataclass

from onward import log
from onward.errors import StartupError
from onward.proto.model import TokenizerFiles
from onward.router.stream_runner import StreamRunner
from onward.text.prompt_tokenizer import PromptTokenizer, tokenizer_hash

MAX_ASKED = 3
"""Instances that are asked at a time."""
MAX_TOKENIZERS = 8
"""Tokenizers in memory, some ten MB each. With more models, tokenizers are fetched repeatedly."""
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
        self._loaded: OrderedDict[str, FetchedTokenizer] = OrderedDict()
        """By hash; the one that was used last stands at the end."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._next_fetch_s: dict[str, float] = {}
        self._logged_problems: dict[str, str] = {}
        """By model, the last one."""

    async def current(self, model: str) -> FetchedTokenizer | str:
        """Returns the tokenizer that all instances of the model have, or the reason why there is none: `MISSING` or
        `DIFFERS`. Waits up to `MAX_WAIT_S` for a fetch that is under way."""
        hashes = self._announced_hashes(model)
        text_hash = self._refresh(model, hashes)
        if (loading := self._loading.get(text_hash)) is not None:
            await asyncio.wait((loading,), timeout=MAX_WAIT_S)
        if len(hashes) > 1:
            return DIFFERS
        loaded = self._loaded.get(text_hash)
        if loaded is None:
            return MISSING
        self._loaded.move_to_end(text_hash)
        return loaded

    def refresh(self, model: str) -> None:
        """Starts to fetch the model's tokenizer if it is not loaded. Called when an instance may have registered, so
        that the tokenizer is there before a request needs it."""
        self._refresh(model, self._announced_hashes(model))

    def _announced_hashes(self, model: str) -> set[str]:
        instances = self._runner.core.serving_instances(self._runner.clock.now_s(), model)
        return {instance.tokenizer_hash for instance in instances if instance.model == model}

    def _refresh(self, model: str, hashes: set[str]) -> str:
        """Returns the hash of the model's tokenizer, and starts to fetch the tokenizer if it is not loaded. Returns an
        empty string if the instances announce no tokenizer, or different ones."""
        if len(hashes) > 1:
            self._log_once(model, "the instances have different tokenizers or chat templates")
        wanted_hash = next(iter(hashes)) if len(hashes) == 1 else ""
        if not wanted_hash:
            return ""
        if wanted_hash in self._loaded:
            self._logged_problems.pop(model, None)
            return wanted_hash
        now_s = self._runner.clock.now_s()
        if wanted_hash not in self._loading and now_s >= self._next_fetch_s.get(wanted_hash, -math.inf):
            self._next_fetch_s = {name: at_s for name, at_s in self._next_fetch_s.items() if at_s > now_s}
            self._next_fetch_s[wanted_hash] = now_s + FETCH_RETRY_S
            self._loading[wanted_hash] = asyncio.create_task(self._load(model, wanted_hash))
        return wanted_hash

    async def _load(self, model: str, wanted_hash: str) -> None:
        assert wanted_hash, "a tokenizer is fetched by its hash"
        try:
            files = await self._fetch(wanted_hash)
            if files is None:
                self._log_once(model, "no instance could be asked for its tokenizer")
                return
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(self._threads, PromptTokenizer, files)
            self._loaded[wanted_hash] = FetchedTokenizer(wanted_hash, tokens)
            while len(self._loaded) > MAX_TOKENIZERS:
                self._loaded.popitem(last=False)
            _logger.info(log.event("tokenizer loaded", model=model, hash=wanted_hash))
        except StartupError as fault:
            self._log_once(model, fault.message)
        finally:
            del self._loading[wanted_hash]

    async def _fetch(self, wanted_hash: str) -> TokenizerFiles | None:
        """Fetches the tokenizer. Checks its hash, because the cluster authentication covers announcements but not this
        answer."""
        instances = self._runner.core.serving_instances(self._runner.clock.now_s())
        for instance in [candidate for candidate in instances if candidate.tokenizer_hash == wanted_hash][:MAX_ASKED]:
            files = await self._runner.upstream.fetch_tokenizer(instance.url)
            if files is not None and tokenizer_hash(files) == wanted_hash:
                return files
        return None

    def _log_once(self, model: str, problem: str) -> None:
        """Logs a problem once, when it begins; each affected request is counted."""
        if self._logged_problems.get(model) == problem:
            return
        known = self._runner.core.instances.known_models()
        self._logged_problems = {name: text for name, text in self._logged_problems.items() if name in known}
        self._logged_problems[model] = problem
        _logger.warning(log.event("texts are not tokenized here, and are sent by load", model=model, cause=problem))

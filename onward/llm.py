"""`onward.LLM` runs a model in this process, without a server. It uses the engine core, worker and text pipeline of the
server.

    with LLM() as llm:
        for completion in llm.chat([{"role": "user", "content": "Say hello."}]):
            print(completion.text)

Only one thread may use an `LLM` at a time. Several streams and a batch may be in progress at once: each engine step
advances all of them, whichever of them asked for it.
"""

import gc
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from onward.config import DEFAULT_MODEL, EngineConfig, WorkerConfig, derive_config
from onward.errors import InvalidRequest, Unavailable
from onward.offline.engine import OfflineEngine, SyncOfflineRunner
from onward.offline.inputs import (
    Conversation,
    Options,
    Prompt,
    build_config,
    check_conversation,
    check_token_ids_exist,
    expand_sampling,
    list_conversations,
    list_prompts,
    validate_token_ids,
)
from onward.offline.output import Completion, CompletionChunk, OfflineRequest
from onward.offline.sampling_options import SamplingOptions
from onward.output_limits import check_output_fits
from onward.proto.model import PreparedModel
from onward.proto.speculative_config import num_draft_tokens_of
from onward.text.bad_words import bad_word_token_ids
from onward.text.chat_template import ChatTemplate
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from onward.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "CompletionChunk", "SamplingOptions"]

ProgressReport = Callable[[int, int], None]
"""Called with the number of tokens and the number of complete outputs."""


class LLM:
    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        cache_dir: Path | None = None,
        progress: Callable[[str, float | None], None] = lambda message, fraction: None,
        **llm_args: Any,
    ) -> None:
        """Loads a model; may first download and convert it. `model` and `llm_args` are flags of `onward serve`
        (`offline.inputs.LLM_ARGS`). Raises `InvalidRequest` for wrong arguments, and `StartupError` for a model that
        cannot be served. `progress(message, fraction)` is called meanwhile; the fraction is None if unknown. On CUDA,
        all objects of the process are then exempt from garbage collection (`gc.freeze`)."""
        config = build_config(model, llm_args)
        from onward.models.loader import cuda_probe, model_store

        if config.device == "cuda":
            cuda_probe.require_cuda_device()
        prepared = model_store.prepare(
            config.model,
            dtype=config.dtype,
            quantization=config.quantization,
            load_format=config.load_format,
            revision=config.revision,
            chat_template=config.chat_template,
            max_model_len=config.max_model_len,
            device=config.device,
            deterministic=config.deterministic,
            cache_dir=cache_dir,
            progress=progress,
        )
        progress("loading the model", None)
        worker_config = derive_config(config, WorkerConfig, kv_backend=None)
        num_drafts = num_draft_tokens_of(config.speculative)
        engine_config = derive_config(
            config, EngineConfig, prefill_peers=(), kv_checksums=False, num_draft_tokens=num_drafts
        )
        from onward.worker.runner_factory import open_runner

        runner = open_runner(prepared, worker_config, progress)
        self._start(prepared, OfflineEngine.from_async_runner(runner, engine_config))
        if config.device == "cuda":
            # The objects that exist now are permanent, so the collector skips them from here on: traversing all of
            # torch costs more than planning the steps.
            gc.collect()
            gc.freeze()

    @classmethod
    def from_runner(cls, model: PreparedModel, runner: SyncOfflineRunner, config: EngineConfig | None = None) -> Self:
        """Creates an `LLM` with an existing runner."""
        llm = cls.__new__(cls)
        llm._start(model, OfflineEngine(runner, config or EngineConfig()))
        return llm

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Options = None, *, show_progress: bool = False
    ) -> list[Completion]:
        """Completes each prompt, a text or a list of token ids. Returns one completion per prompt, in the same
        order."""
        token_lists = {path: self._encode(prompt, path) for path, prompt in list_prompts(prompts)}
        return self._complete(token_lists, sampling, show_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Options = None,
        *,
        show_progress: bool = False,
    ) -> list[Completion]:
        """Answers one conversation or several, each a list of messages with `role` and `content`."""
        token_lists = {
            path: self._encode_chat(conversation, path) for path, conversation in list_conversations(messages)
        }
        return self._complete(token_lists, sampling, show_progress)

    def stream(self, prompt: Prompt, sampling: SamplingOptions | None = None) -> Iterator[CompletionChunk]:
        """Yields one completion in chunks. Closing the iterator aborts the request."""
        return self._stream(self._encode(prompt, "prompts"), "prompts", sampling)

    def stream_chat(self, messages: Conversation, sampling: SamplingOptions | None = None) -> Iterator[CompletionChunk]:
        return self._stream(self._encode_chat(messages, "messages"), "messages", sampling)

    def close(self) -> None:
        """Releases the model's memory. Later calls raise `Unavailable`."""
        self._engine_or_none = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, model: PreparedModel, engine: OfflineEngine) -> None:
        self.model = model
        self._tokenizer = Tokenizer.from_file(Path(model.folder) / model.tokenizer) if model.tokenizer else None
        self._table = self._tokenizer.table if self._tokenizer else TokenTable([])
        self._template = (
            ChatTemplate(model.chat_template, model.bos_token, model.eos_token) if model.chat_template else None
        )
        self._engine_or_none: OfflineEngine | None = engine

    @property
    def _engine(self) -> OfflineEngine:
        if self._engine_or_none is None:
            raise Unavailable("this LLM was closed")
        return self._engine_or_none

    def _encode(self, prompt: Prompt, path: str) -> list[int]:
        if not isinstance(prompt, str):
            return validate_token_ids(prompt, path, self._engine.worker.vocab_size)
        if self._tokenizer is None:
            raise InvalidRequest(f"{path}: this model has no tokenizer; give token ids", param="prompts")
        if not (token_ids := self._tokenizer.encode(prompt)):
            raise InvalidRequest(f"{path}: must not be empty", param="prompts")
        return token_ids

    def _encode_chat(self, conversation: Conversation, path: str) -> list[int]:
        if self._template is None or self._tokenizer is None:
            raise InvalidRequest("messages: this model has no chat template; use generate", param="messages")
        check_conversation(conversation, path)
        return self._tokenizer.encode_chat(self._template.render(conversation, created_s=time.time()))

    def _create_request(self, prompt_token_ids: list[int], path: str, options: SamplingOptions) -> OfflineRequest:
        worker = self._engine.worker
        check_output_fits(len(prompt_token_ids), options.max_tokens, options.min_tokens, worker, path)
        check_token_ids_exist(options, worker.vocab_size)
        bad_words = bad_word_token_ids(options.bad_words, self._tokenizer)
        sampling = options.to_sampling(self.model.eos_token_ids, bad_words)
        stream = TextStream(
            self._table,
            options.stop_strings,
            end_token_ids=sampling.end_token_ids,
            min_tokens=sampling.min_tokens,
        )
        return OfflineRequest(uuid.uuid4().hex, prompt_token_ids, sampling, stream)

    def _complete(self, token_lists: dict[str, list[int]], sampling: Options, show_progress: bool) -> list[Completion]:
        options = expand_sampling(sampling, len(token_lists))
        requests = [
            self._create_request(ids, path, sampling_options)
            for (path, ids), sampling_options in zip(token_lists.items(), options, strict=True)
        ]
        with _progress_bar(len(requests)) if show_progress else _no_progress_bar() as report:
            self._run(requests, report)
        return [request.completion() for request in requests]

    def _run(self, requests: list[OfflineRequest], report: ProgressReport) -> None:
        engine = self._engine
        waiting, num_done, num_done_tokens = deque(requests), 0, 0
        running: list[OfflineRequest] = []
        try:
            while waiting or running:
                while waiting and engine.can_submit:
                    running.append(waiting.popleft())
                    engine.submit(running[-1])
                engine.step()
                num_done_tokens += sum(
                    len(request.token_ids) for request in running if request.finish_reason is not None
                )
                running = [request for request in running if request.finish_reason is None]
                num_done = len(requests) - len(waiting) - len(running)
                report(num_done_tokens + sum(len(request.token_ids) for request in running), num_done)
        finally:
            engine.abort(running)

    def _stream(
        self, prompt_token_ids: list[int], param: str, sampling: SamplingOptions | None
    ) -> Iterator[CompletionChunk]:
        """Checks the request, and returns an iterator that submits it at the first chunk. This is not a generator
        itself, so that invalid input is refused at once and not at the first chunk."""
        request = self._create_request(prompt_token_ids, param, sampling or SamplingOptions())
        return self._chunks(self._engine, request)

    def _chunks(self, engine: OfflineEngine, request: OfflineRequest) -> Iterator[CompletionChunk]:
        if not engine.can_submit:
            raise Unavailable("too many streams are open; finish or close some")
        engine.submit(request)
        try:
            while True:
                while request.unread_chunks:
                    yield request.unread_chunks.popleft()
                if request.finish_reason is not None:
                    return
                engine.step()
        finally:
            engine.abort([request])


@contextmanager
def _progress_bar(num_outputs: int) -> Iterator[ProgressReport]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeElapsedColumn()
    started_s = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task("generating", total=num_outputs, rate=0.0)

        def report(num_tokens: int, num_done: int) -> None:
            elapsed_s = max(time.monotonic() - started_s, 1e-9)
            progress.update(task, completed=num_done, rate=num_tokens / elapsed_s)

        yield report


@contextmanager
def _no_progress_bar() -> Iterator[ProgressReport]:
    yield lambda num_tokens, num_done: None

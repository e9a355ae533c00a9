"""An engine core and a worker in this process, driven by calls of `step`: each call plans, runs one step and delivers
its tokens.

This module is also the layer above the engine, so it does the recovery: it resubmits open requests with their tokens so
far.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, Self

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.offline.output import OfflineRequest
from onward.proto.engine import Abort, Submit, ToEngine, TokenDelta, TokenDeltas
from onward.proto.step import WorkerHello
from onward.transport.inproc_wire import AsyncStepRunner, AsyncWorkerWire, InprocWorkerWire, StepRunner

_API_ID = "llm"
_INCARNATION = "e1"


class SyncOfflineRunner(StepRunner, Protocol):
    def hello(self, worker_incarnation: str, engine_incarnation: str, /) -> WorkerHello: ...


class AsyncOfflineRunner(AsyncStepRunner, Protocol):
    def hello(self, worker_incarnation: str, engine_incarnation: str, /) -> WorkerHello: ...


class OfflineEngine:
    def __init__(self, runner: SyncOfflineRunner, config: EngineConfig) -> None:
        self._open(runner.hello("w1", _INCARNATION), config, lambda: InprocWorkerWire(runner))

    @classmethod
    def from_async_runner(cls, runner: AsyncOfflineRunner, config: EngineConfig) -> Self:
        """Creates an engine with a runner that computes while the calling thread does other work."""
        engine = cls.__new__(cls)
        engine._open(runner.hello("w1", _INCARNATION), config, lambda: AsyncWorkerWire(runner))
        return engine

    def _open(
        self, worker: WorkerHello, config: EngineConfig, new_wire: Callable[[], InprocWorkerWire | AsyncWorkerWire]
    ) -> None:
        self.worker, self._new_wire = worker, new_wire
        # Enough requests that the place of a finished one is taken at once. The rest of a long list waits in the
        # caller.
        self._max_live = min(2 * config.max_num_seqs, config.max_queue)
        # No request is refused for the length of its prompt: the queue is limited in requests only.
        self._config = replace(config, max_queue_tokens=max(1, self._max_live * self.worker.max_request_tokens))
        self._live: dict[str, OfflineRequest] = {}
        self._seq = 0
        self._new_core()

    @property
    def can_submit(self) -> bool:
        return len(self._live) < self._max_live

    def submit(self, request: OfflineRequest) -> None:
        """Submits a request with its tokens so far; a new request has none."""
        assert self.can_submit or request.request_id in self._live, "the owner asks before"
        self._live[request.request_id] = request
        request.attempt_epoch += 1
        self._send(
            lambda seq: Submit(
                seq,
                request.request_id,
                request.attempt_epoch,
                request.prompt_token_ids,
                request.sampling,
                list(request.token_ids),
                num_cached_tokens=request.num_cached_tokens,
            )
        )

    def step(self) -> None:
        """Plans the steps that may be in flight, commits the oldest one, and delivers its tokens."""
        try:
            while (plan := self._core.plan(time.monotonic())) is not None:
                self._wire.send(plan)
            result = self._wire.receive()
            if result is not None:
                self._core.commit(result, time.monotonic())
            self._deliver()
        except BaseException:
            self._restart()
            raise
        # Otherwise the loop that waits for a token would never end.
        assert result is not None or not self._live, "unfinished requests have a step planned"

    def abort(self, requests: Iterable[OfflineRequest]) -> None:
        """Aborts requests whose output is no longer read, and frees what they hold."""
        for request in requests:
            if self._live.pop(request.request_id, None) is not None:
                self._send(lambda seq, aborted=request: Abort(seq, aborted.request_id, aborted.attempt_epoch))
        for _ in range(self._config.max_steps_in_flight + 1):
            if self._live or self._core.idle:
                return
            self.step()

    def audit_idle(self) -> None:
        self._core.audit_idle()

    def _restart(self) -> None:
        """Replaces the engine core and its wire after a step that Ctrl-C or a fault has cut short; the runner stays.
        What that step wrote is unknown, so the KV cache counts as lost. Resubmits open requests with their tokens."""
        self._new_core()
        for request in self._live.values():
            self.submit(request)

    def _new_core(self) -> None:
        self._wire = self._new_wire()
        self._core = EngineCore(self._config, _INCARNATION, self.worker)

    def _send(self, message: Callable[[int], ToEngine]) -> None:
        self._seq += 1
        self._core.receive_from_api(_API_ID, message(self._seq), time.monotonic())

    def _deliver(self) -> None:
        for _, message in self._core.take_api_messages():
            for delta in message.deltas if isinstance(message, TokenDeltas) else ():
                request = self._live.get(delta.request_id)
                if request is not None and request.attempt_epoch == delta.epoch:
                    self._apply_delta(request, delta)

    def _apply_delta(self, request: OfflineRequest, delta: TokenDelta) -> None:
        request.apply_delta(delta)
        if request.finish_reason is None:
            return
        del self._live[request.request_id]
        if delta.finish_reason is None:  # a stop string, which the engine cannot see
            self._send(
                lambda seq: Abort(seq, request.request_id, request.attempt_epoch, "stop", len(request.token_ids))
            )

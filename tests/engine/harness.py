"""An engine core with a hash worker behind it, driven by hand: time, delays, crashes and clients are the test's."""

from collections import deque
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.engine.scheduling.scheduling_policy import queue_key
from onward.proto.engine import (
    Abort,
    AbortByName,
    AbortReply,
    ErrorInfo,
    FromEngine,
    HeldRequestsReport,
    RequestAccepted,
    Submit,
    TokenDelta,
    TokenDeltas,
    WorkerCrashReport,
)
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import StepPlan, StepResult
from onward.proto.trace import PhaseChange, RequestPhases
from onward.sim import engine_audit
from onward.sim.hash_worker import HashDraftProposer, HashWorker, KvCells, expected_embedding, expected_output

API = "api-1"


class Client:
    """One request as its api process sees it."""

    def __init__(self, submit: Submit, arrived_s: float) -> None:
        self.submit = submit
        self.arrived_s = arrived_s
        self.tokens: list[int] = list(submit.generated_token_ids)
        self.finish_reason: str | None = None
        self.error: ErrorInfo | None = None
        self.embedding: bytes | None = None
        self.num_finishes = 0
        self.accepted = False
        self.cached: int | None = None
        self.worker_crashes = 0
        self.reads = True
        """False once a late repetition of a request that is over was sent: what comes of it is dropped, as an api does."""

    @property
    def error_code(self) -> str | None:
        return self.error.code if self.error else None


@dataclass(slots=True, frozen=True)
class Written:
    """The tokens [begin, end) of one slot."""

    slot: int
    epoch: int
    begin: int
    end: int
    block_ids: list[int]


class Harness:
    worker_class: type[HashWorker] = HashWorker

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 64,
        max_model_len: int = 1 << 20,
        incarnation: str = "e1",
        **config: object,
    ) -> None:
        self.config = EngineConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 32} | config))  # type: ignore[arg-type]
        self.shape = {"vocab_size": vocab_size, "max_model_len": max_model_len}
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.doomed: set[str] = set()
        self.num_memories = 0
        self.kept_memory: KvCells | None = None
        """The KV memory of the last worker, if it outlives that."""
        self.worker = self._new_worker()
        self.core = EngineCore(self.config, incarnation, self.worker.hello())
        self.plans: deque[StepPlan] = deque()
        self.all_plans: list[StepPlan] = []
        self.written: dict[int, list[Written]] = {}
        """What each step in flight may write."""
        self.clients: dict[str, Client] = {}
        self.holding: list[HeldRequestsReport] = []
        self.phases: list[tuple[str, PhaseChange]] = []
        self.peer_phases: list[tuple[str, PhaseChange]] = []
        """By the address of the prefill instance."""
        """What is told of traced requests, by id."""
        self.abort_answers: list[AbortReply] = []
        self.now_s = 0.0
        self.seq = 0

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        max_tokens: int | None = 8,
        seed: int = 0,
        temperature: float = 0.0,
        end: tuple[int, ...] = (),
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        pooling: Pooling | None = None,
        epoch: int = 1,
        generated: list[int] | None = None,
        **fields: object,
    ) -> Client:
        self.seq += 1
        sampling = SamplingParams(
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            end_token_ids=end,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
        )
        message = Submit(
            self.seq,
            request_id,
            epoch,
            list(prompt),
            sampling,
            list(generated or []),
            **fields,  # type: ignore[arg-type]
        )
        client = Client(message, self.now_s - message.waited_s)
        self.clients[request_id] = client
        self.core.receive_from_api(API, message, self.now_s)
        self.deliver()
        return client

    def abort(self, request_id: str, **fields: object) -> None:
        self.seq += 1
        self.core.receive_from_api(API, Abort(self.seq, request_id, **fields), self.now_s)  # type: ignore[arg-type]
        self.deliver()

    def abort_by_name(self, *names: str, everything: bool = False, caller: str | None = None) -> AbortReply:
        self.seq += 1
        message = AbortByName(self.seq, self.seq, list(names), everything, caller=caller)
        self.core.receive_from_api(API, message, self.now_s)
        self.deliver()
        return self.abort_answers[-1]

    def stop(self, client: Client, num_tokens: int) -> None:
        """The api has found a stop string: it knows the end already, and tells the engine."""
        del client.tokens[num_tokens:]
        client.finish_reason = "stop"
        client.num_finishes += 1
        self.abort(client.submit.request_id, epoch=client.submit.epoch, reason="stop", num_tokens=num_tokens)

    def repeat(self, client: Client) -> None:
        """A submission comes a second time, perhaps long after the request is over."""
        client.reads = client.finish_reason is None
        self.core.receive_from_api(API, client.submit, self.now_s)
        self.deliver()

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.tick(self.now_s)
        self.deliver()

    def plan(self) -> StepPlan | None:
        """Plans one step and sends it. It stays in flight until `answer`."""
        plan = self.core.plan(self.now_s)
        if plan is not None:
            self.plans.append(plan)
            self.all_plans.append(plan)
            self._note(plan)
            self._send(plan)
        return plan

    def answer(self) -> None:
        """The worker executes the oldest plan, and the engine hears of it."""
        self.now_s += 0.01
        self.core.commit(self._result(), self.now_s)
        self.deliver()

    def crash_worker(self, *, keeps_memory: bool = False) -> None:
        """The worker dies; plans on their way die with it. The next one is there at once."""
        self.lose_worker(keeps_memory=keeps_memory)
        self.start_worker()

    def lose_worker(self, *, keeps_memory: bool = False) -> None:
        """In memory that is kept, the first step in flight has written its KV, and the engine does not learn of it."""
        if self.core.worker is not None:
            if self.plans and keeps_memory:
                self._result()
            self._lose_plans()
            self.kept_memory = self.worker.memory if keeps_memory else None
            self.core.on_worker_lost(self.now_s, keeps_memory=keeps_memory)
            self.deliver()

    def start_worker(self, *, attaches: bool = True) -> None:
        """`attaches`: to the memory that was kept, if any; else it gets a new one."""
        if self.core.worker is None:
            self.worker = self._new_worker(self.kept_memory if attaches else None)
            self.core.on_worker_ready(self.worker.hello("w2"), self.now_s)
            self.deliver()

    def crash_engine(self) -> None:
        """Engine and worker die; the clients resubmit what they have, under a higher epoch."""
        self._lose_plans()
        self.worker = self._new_worker()
        self.core = EngineCore(self.config, "e2", self.worker.hello())
        for client in self.clients.values():
            if client.finish_reason is None:
                self.resubmit(client)

    def check(self) -> None:
        """Everything that must hold between two events."""
        engine_audit.audit_engine(self.core)
        pool = self.core.scheduler.pool
        free = {*pool._free, *pool._cached}
        for plan in self.plans:
            written = {block for one in self.written[plan.step] for block in self._blocks_of(one)}
            assert not written & free, "what a step in flight may write is not handed out"
            assert all(pool._block_hash[block] is None for block in written), "what has a name is written no more"

    def _new_worker(self, memory: KvCells | None = None) -> HashWorker:
        drafts = HashDraftProposer(7) if self.config.num_draft_tokens else None
        self.num_memories += memory is None
        name = f"memory-{self.num_memories}"
        worker = self.worker_class(
            self.num_blocks, self.block_size, drafts=drafts, memory=memory, kv_memory=name, **self.shape
        )
        worker.failing_requests = self.doomed
        return worker

    def _send(self, plan: StepPlan) -> None:
        """To the worker. Here a plan is executed when its result is asked for."""

    def _result(self) -> StepResult:
        return self.worker.step(self.plans.popleft())

    def _lose_plans(self) -> None:
        self.plans.clear()

    def _note(self, plan: StepPlan) -> None:
        scheduler = self.core.scheduler
        self.written[plan.step] = []
        for run in plan.run:
            request = scheduler.request_of_slot_epoch(run.slot_epoch)
            assert request is not None, "who runs is known"
            end = request.planned_computed
            begin = end - sum(planned.num_drafts for planned in request.planned_runs) - run.num_tokens
            self.written[plan.step].append(Written(run.slot, run.slot_epoch, begin, end, list(request.block_ids)))
        if plan.preempt:
            first = min(self.core._live.values(), key=queue_key)
            assert first.slot_epoch not in {p.slot_epoch for p in plan.preempt}, (
                "the first in line never loses its blocks"
            )

    def _blocks_of(self, written: "Written") -> list[int]:
        """Returns the written blocks. If drafts were right, the worker begins further along than the plan could know."""
        slot = self.worker.slots.get(written.slot)
        begin = (
            max(written.begin, slot.num_computed) if slot and slot.spec.slot_epoch == written.epoch else written.begin
        )
        return written.block_ids[begin // self.block_size : -(-written.end // self.block_size)]

    def resubmit(self, client: Client) -> None:
        self.seq += 1
        old = client.submit
        client.submit = Submit(
            self.seq,
            old.request_id,
            old.epoch + 1,
            old.prompt_token_ids,
            old.sampling_params,
            list(client.tokens),
            waited_s=self.now_s - client.arrived_s,
            priority=old.priority,
            cache_salt=old.cache_salt,
            worker_crashes=client.worker_crashes,
            num_cached_tokens=client.cached,
            caller=old.caller,
            caller_limits=old.caller_limits,
            trace_id=old.trace_id,
        )
        self.core.receive_from_api(API, client.submit, self.now_s)
        self.deliver()

    def deliver(self) -> None:
        for owner, message in self.core.take_api_messages():
            assert owner == API
            self._hear(message)

    def _hear(self, message: FromEngine) -> None:
        match message:
            case TokenDeltas():
                for delta in message.deltas:
                    self._take(delta)
            case RequestAccepted():
                self.clients[message.request_id].accepted = True
            case WorkerCrashReport():
                self.clients[message.request_id].worker_crashes = message.worker_crashes
            case AbortReply():
                self.abort_answers.append(message)
            case RequestPhases(prefill_peer=peer) if peer:
                self.peer_phases += [(peer, change) for change in message.changes]
            case RequestPhases():
                self.phases += [(message.request_id, change) for change in message.changes]
            case HeldRequestsReport():
                self.holding.append(message)
                for held in message.held:
                    client = self.clients[held.request_id]
                    if client.reads and held.epoch == client.submit.epoch:
                        assert held.position == len(client.tokens), "what is held was told before"

    def _take(self, delta: TokenDelta) -> None:
        client = self.clients[delta.request_id]
        if delta.epoch != client.submit.epoch or not client.reads:
            return
        assert client.num_finishes == 0, "nothing comes after the end"
        assert delta.position == len(client.tokens), "the next position, and no other"
        assert delta.num_prompt_tokens == len(client.submit.prompt_token_ids)
        assert client.cached is None or delta.num_cached_tokens == client.cached or not client.tokens
        client.tokens += delta.token_ids
        client.cached = delta.num_cached_tokens
        if delta.token_ids:
            client.worker_crashes = 0
        if delta.finish_reason:
            client.finish_reason = delta.finish_reason
            client.num_finishes += 1
            client.error = delta.error
            client.embedding = delta.embedding

    def run_until_idle(self, max_steps: int = 20_000) -> None:
        """Two steps in flight, as in production."""
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            if not self.plans:
                assert self.core.idle, "unfinished requests have a step planned"
                return
            self.answer()
        raise AssertionError(f"not idle after {max_steps} steps")

    @property
    def max_tokens(self) -> int:
        return min(self.num_blocks * self.block_size, self.shape["max_model_len"])

    def expected(self, client: Client) -> list[int]:
        sampling = client.submit.sampling_params
        room = self.max_tokens - len(client.submit.prompt_token_ids)
        max_output = sampling.max_tokens if sampling.max_tokens is not None else room
        return expected_output(client.submit.prompt_token_ids, sampling, max_output, self.vocab_size)

    def check_all_exact(self) -> None:
        for client in self.clients.values():
            assert client.finish_reason in ("stop", "length"), (client.submit.request_id, client.error_code)
            assert client.tokens == self.expected(client), client.submit.request_id

    def expected_vector(self, client: Client) -> bytes:
        return expected_embedding(client.submit.prompt_token_ids, client.submit.sampling_params)

    def metric(self, counter: str, *labels: str) -> float:
        return getattr(self.core.metrics, counter).value(*labels)

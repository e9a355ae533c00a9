"""An engine core with a hash worker behind it, driven by hand: time, delays, crashes and clients are the test's."""

from collections import deque

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.proto.request import Abort, Accepted, Charged, Deltas, Holding, Submit
from onward.proto.sampling import Sampling
from onward.proto.step import StepPlan
from onward.sim.worker import HashWorker, expected_output

API = "api-1"


class Client:
    """One request as its api process sees it."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens: list[int] = list(submit.generated_token_ids)
        self.finish_reason: str | None = None
        self.error_code: str | None = None
        self.num_finishes = 0
        self.accepted = False
        self.cached: int | None = None
        self.crash_charges = 0


class Harness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 64,
        max_model_len: int = 1 << 20,
        **config: object,
    ) -> None:
        self.config = EngineConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 32} | config))  # type: ignore[arg-type]
        self.shape = {"vocab_size": vocab_size, "max_model_len": max_model_len}
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.worker = HashWorker(num_blocks, block_size, **self.shape)
        self.core = EngineCore(self.config, "e1", self.worker.hello())
        self.plans: deque[StepPlan] = deque()
        self.all_plans: list[StepPlan] = []
        self.clients: dict[str, Client] = {}
        self.holding: list[Holding] = []
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
        epoch: int = 1,
        generated: list[int] | None = None,
        **fields: object,
    ) -> Client:
        self.seq += 1
        sampling = Sampling(
            seed=seed, temperature=temperature, max_tokens=max_tokens, end_token_ids=end, min_tokens=min_tokens
        )
        message = Submit(
            self.seq,
            request_id,
            epoch,
            list(prompt),
            sampling,
            list(generated or []),
            arrival_s=fields.pop("arrival_s", float(self.seq)),  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]
        )
        client = Client(message)
        self.clients[request_id] = client
        self.core.receive(API, message, self.now_s)
        self.deliver()
        return client

    def abort(self, request_id: str, **fields: object) -> None:
        self.seq += 1
        self.core.receive(API, Abort(self.seq, request_id, **fields), self.now_s)  # type: ignore[arg-type]
        self.deliver()

    def plan(self) -> StepPlan | None:
        """Plans one step and sends it. It stays in flight until `answer`."""
        plan = self.core.plan(self.now_s)
        if plan is not None:
            self.plans.append(plan)
            self.all_plans.append(plan)
        return plan

    def answer(self) -> None:
        """The worker executes the oldest plan, and the engine hears of it."""
        self.now_s += 0.01
        self.core.commit(self.worker.step(self.plans.popleft()), self.now_s)
        self.deliver()

    def crash_worker(self) -> None:
        """The worker dies with its memory; plans on their way die with it."""
        self.plans.clear()
        self.core.worker_lost(self.now_s)
        self.worker = HashWorker(self.num_blocks, self.block_size, **self.shape)
        self.core.worker_up(self.worker.hello("w2"), self.now_s)
        self.deliver()

    def crash_engine(self) -> None:
        """Engine and worker die; the clients resubmit what they have, under a higher epoch."""
        self.plans.clear()
        self.worker = HashWorker(self.num_blocks, self.block_size, **self.shape)
        self.core = EngineCore(self.config, "e2", self.worker.hello())
        for client in self.clients.values():
            if client.finish_reason is None:
                self.resubmit(client)
        self.deliver()

    def resubmit(self, client: Client) -> None:
        self.seq += 1
        old = client.submit
        client.submit = Submit(
            self.seq,
            old.request_id,
            old.epoch + 1,
            old.prompt_token_ids,
            old.sampling,
            list(client.tokens),
            arrival_s=old.arrival_s,
            priority=old.priority,
            cache_salt=old.cache_salt,
            crash_charges=client.crash_charges,
            num_cached_tokens=client.cached,
        )
        self.core.receive(API, client.submit, self.now_s)

    def deliver(self) -> None:
        for owner, message in self.core.drain():
            assert owner == API
            match message:
                case Deltas():
                    for delta in message.deltas:
                        self._take(delta)
                case Accepted():
                    self.clients[message.request_id].accepted = True
                case Charged():
                    self.clients[message.request_id].crash_charges = message.crash_charges
                case Holding():
                    self.holding.append(message)

    def _take(self, delta) -> None:
        client = self.clients[delta.request_id]
        if delta.epoch != client.submit.epoch:
            return
        assert client.num_finishes == 0, "nothing comes after the end"
        assert delta.position == len(client.tokens), "the next position, and no other"
        client.tokens += delta.token_ids
        client.cached = delta.num_cached_tokens
        if delta.token_ids:
            client.crash_charges = 0
        if delta.finish_reason:
            client.finish_reason = delta.finish_reason
            client.num_finishes += 1
            client.error_code = delta.error.code if delta.error else None

    def run_until_idle(self, max_steps: int = 20_000) -> None:
        """Two steps in flight, as in production."""
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            if not self.plans:
                assert self.core.idle, "there is work, and nobody plans it"
                return
            self.answer()
        raise AssertionError(f"not idle after {max_steps} steps")

    def expected(self, client: Client) -> list[int]:
        limit = min(self.num_blocks * self.block_size, self.shape["max_model_len"])
        sampling = client.submit.sampling
        room = limit - len(client.submit.prompt_token_ids)
        max_output = sampling.max_tokens if sampling.max_tokens is not None else room
        return expected_output(client.submit.prompt_token_ids, sampling, max_output, self.vocab_size)

    def check_all_exact(self) -> None:
        for client in self.clients.values():
            assert client.finish_reason in ("stop", "length"), (client.submit.request_id, client.error_code)
            assert client.tokens == self.expected(client), client.submit.request_id

    def metric(self, counter: str, *labels: str) -> float:
        return getattr(self.core.metrics, counter).value(*labels)

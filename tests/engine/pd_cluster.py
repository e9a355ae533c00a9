"""Decode and prefill engines in one thread: real cores, hash workers, a network and data planes that the test controls."""

from collections import deque
from collections.abc import Callable

from onward.proto.handoff import ToDecode, ToPrefill
from onward.sim import engine_audit
from onward.sim.hash_worker import HashDraftProposer, HashWorker, KvCells
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from tests.engine.harness import Client, Harness


class Instance(Harness):
    """One engine with a worker that has a data plane."""

    def __init__(self, name: str, planes: SimKvNetwork, **config: object) -> None:
        self.name, self.planes, self.peer_address = name, planes, name
        self.arguments = dict(config)
        self.num_workers = 0
        self.alive = True
        self.worker_is_stopped = self._is_in_network = False
        super().__init__(incarnation=name, **config)

    def _new_worker(self, memory: KvCells | None = None) -> HashWorker:
        self._leave_network()
        self.num_workers += 1
        plane = SimKvTransfer(f"{self.name}/{self.num_workers}")
        drafts = HashDraftProposer(7) if self.config.num_draft_tokens else None
        self.num_memories += memory is None
        name = f"memory-{self.num_memories}"
        worker = HashWorker(
            self.num_blocks,
            self.block_size,
            kv_transfer=plane,
            drafts=drafts,
            memory=memory,
            kv_memory=name,
            **self.shape,
        )
        worker.failing_requests = self.doomed
        plane.memory = worker.memory
        self.planes.add(plane)
        self._is_in_network = True
        return worker

    def _leave_network(self) -> None:
        """The worker is dead."""
        if self._is_in_network:
            self.planes.remove(self.worker.kv_transfer.address)
        self._is_in_network = False

    def lose_worker(self, *, keeps_memory: bool = False) -> None:
        """As its supervisor decides: memory that a peer may still write is not kept."""
        if self.core.worker is not None:
            self._leave_network()
            keeps_memory = keeps_memory and not self.planes.may_be_written(self.plane.address)
        super().lose_worker(keeps_memory=keeps_memory)

    @property
    def plane(self) -> SimKvTransfer:
        return self.worker.kv_transfer

    def stop_worker(self) -> None:
        """It completes no step, reports no KV and writes none. The other processes are not told."""
        self.worker_is_stopped = self.plane.stalled = True

    def continue_worker(self) -> None:
        self.worker_is_stopped = self.plane.stalled = False

    def kill(self) -> None:
        """The whole instance, without a word."""
        self.alive = False
        self._leave_network()


class Cluster:
    def __init__(self, num_prefill: int = 1, *, prefill: dict | None = None, **decode: object) -> None:
        self.planes = SimKvNetwork()
        self.peers = {
            f"p{i}": Instance(f"p{i}", self.planes, role="prefill", **(prefill or {})) for i in range(num_prefill)
        }
        config = {"role": "decode", "prefill_peers": tuple(self.peers), "local_prefill_tokens": 0} | decode
        self.decode = Instance("d", self.planes, **config)
        self.to_prefill: deque[tuple[str, ToPrefill]] = deque()
        self.to_decode: deque[tuple[str, ToDecode]] = deque()
        self.holds: Callable[[object], bool] = lambda message: False
        """Messages that stay on the wire for now."""
        self.loses: Callable[[object], bool] = lambda message: False
        self.num_restarts = 0
        self.seen: list[object] = []
        """Every message that was sent, also those that were lost."""

    @property
    def prefill(self) -> Instance:
        return self.peers["p0"]

    def submit(self, request_id: str, prompt: list[int], **fields: object) -> Client:
        return self.decode.submit(request_id, prompt, **fields)

    def turn(self, *, steps: bool = True, planes: bool = True) -> bool:
        """Each instance takes one turn of its loop. Whether anything moved."""
        moved = False
        for instance in self._instances():
            if steps:
                while instance.core.worker is not None and instance.plan() is not None:
                    moved = True
                if instance.plans and not instance.worker_is_stopped:
                    instance.answer()
                    moved = True
            instance.tick(0.0)
            self._collect(instance)
        moved |= self.deliver()
        if planes:
            moved |= self.planes.step()
        moved |= self.report()
        return moved

    def deliver(self) -> bool:
        """Messages arrive that are not held."""
        moved = False
        for _ in range(len(self.to_prefill)):
            address, message = self.to_prefill.popleft()
            if self.holds(message):
                self.to_prefill.append((address, message))
            elif self.peers[address].alive:
                self.peers[address].core.receive_from_decode(
                    self.decode.core.incarnation, message, self.peers[address].now_s
                )
                moved |= type(message).__name__ not in ("Ping", "HandoffHeartbeat")
        for _ in range(len(self.to_decode)):
            address, message = self.to_decode.popleft()
            if self.holds(message):
                self.to_decode.append((address, message))
            elif self.decode.alive:
                self.decode.core.receive_from_prefill(address, message, self.decode.now_s)
                moved |= type(message).__name__ not in ("Pong", "HandoffHeartbeat")
        return moved

    def report(self) -> bool:
        moved = False
        for instance in self._instances():
            if instance.worker_is_stopped:
                continue
            reports, instance.plane.reports = instance.plane.reports, []
            for report in reports:
                instance.core.receive_kv_report(report, instance.now_s)
                moved = True
        return moved

    def restart_prefill(self, address: str) -> None:
        """Killed without a word, and there again under another incarnation."""
        old = self.peers[address]
        old.kill()
        self.num_restarts += 1
        new = Instance(f"{address}.{self.num_restarts}", self.planes, **old.arguments)
        new.peer_address = address
        new.now_s = old.now_s
        self.peers[address] = new

    def settle(self, seconds: float = 0.0, max_turns: int = 5000) -> None:
        """Until nothing moves; then time passes, in small steps, so often that `seconds` are over."""
        for _ in range(max_turns):
            while self.turn():
                pass
            if seconds <= 0:
                return
            self.pass_time(0.1)
            seconds -= 0.1
        raise AssertionError("never settles")

    def pass_time(self, seconds: float) -> None:
        for instance in self._instances():
            instance.tick(seconds)
            self._collect(instance)

    def check(self) -> None:
        for instance in self._instances():
            instance.check()

    def check_idle(self) -> None:
        for instance in self._instances():
            assert instance.core.idle, instance.name
            instance.core.audit_idle()
            engine_audit.audit_engine(instance.core)
            assert not instance.plane.expected_leases, f"{instance.name} expects what nobody will send"
            assert not instance.plane.pushes, f"{instance.name} pushes what nobody wants"

    def _collect(self, instance: Instance) -> None:
        outgoing = instance.core.take_handoff_messages()
        for address, message in outgoing.to_prefill:
            self.decode.core.on_peer_send(address, self.peers[address].alive, self.decode.now_s)
            if self.peers[address].alive:
                self._send(self.to_prefill, address, message)
        for _, message in outgoing.to_decode:
            self._send(self.to_decode, instance.peer_address, message)
        for command in outgoing.kv_commands:
            instance.plane.command(command)
        instance.deliver()

    def _send(self, wire: deque, address: str, message: object) -> None:
        self.seen.append(message)
        if not self.loses(message):
            wire.append((address, message))

    def _instances(self) -> list[Instance]:
        return [one for one in [self.decode, *self.peers.values()] if one.alive]

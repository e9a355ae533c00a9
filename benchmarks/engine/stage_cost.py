"""What the token stage costs: CPU time per token for each wire, and the round trip of an empty step.

    timed      result ── wire ──> commit: every stage ──> drain ──> encoded for the api
    not timed  planning, and the worker's own work: it answers from a counter

`python -m benchmarks.engine.stage_cost` prints a table. The wires take turns in every round, so that a machine which
changes its speed changes it for all of them.
"""

import argparse
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.engine import stage_wires
from onward.bench import environment
from onward.bench.report import percentile
from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.obs.tables import print_table
from onward.proto import SCHEMA_VERSION
from onward.proto.engine import Submit
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotTokens, StepPlan, StepResult, TokenLogprobs, WorkerHello
from onward.transport.worker_wire import open_engine_wire_end
from onward.transport.zmq_sockets import SocketPoller

SLOTS = (1, 64, 512)
TOKENS_PER_RUN = {1: 4_000, 64: 40_000, 512: 80_000}
EMPTY_STEPS = 3_000
EMPTY_STEP_SLOTS = 64
BARRED_WIRES = ("zmq", "shm")
BAR_US = 4.0
TOP_LOGPROBS = 5
NUM_PROMPT, BLOCK_SIZE, VOCAB_SIZE = 32, 16, 50_000
WARM_UP_STEPS = 4


class StageFigures(msgspec.Struct, frozen=True):
    """Medians over the rounds."""

    us_per_token: dict[str, dict[str, float]]
    """By wire, then by the number of slots."""
    round_trip_us: dict[str, dict[str, float]]
    """Round trip of an empty step, by wire: p50 and p99."""
    rounds: int
    machine: dict[str, Any]


class DecodingEngine:
    """A core whose requests all decode, with a worker that answers every run with one token."""

    def __init__(self, num_slots: int, num_steps: int, *, top_logprobs: int | None = None) -> None:
        blocks = num_slots * ((NUM_PROMPT + num_steps) // BLOCK_SIZE + 3)
        hello = WorkerHello(SCHEMA_VERSION, "w", "e", 0, "", blocks, BLOCK_SIZE, 1 << 20, VOCAB_SIZE)
        config = EngineConfig(
            max_num_seqs=num_slots, max_num_batched_tokens=num_slots * NUM_PROMPT, max_queue=num_slots
        )
        self.core = EngineCore(config, "e", hello)
        self._plans: deque[StepPlan] = deque()
        self._lengths: dict[int, int] = {}
        self._logprobs = (
            [TokenLogprobs(-0.5, 1, [(i, -0.5 - i) for i in range(top_logprobs)])] if top_logprobs else None
        )
        sampling = SamplingParams(
            seed=1, max_tokens=num_steps + 8, end_token_ids=(0, 2), min_tokens=1, logprobs=top_logprobs
        )
        for index in range(num_slots):
            prompt = [(index * 31 + i) % VOCAB_SIZE for i in range(NUM_PROMPT)]
            self.core.receive_from_api("api", Submit(index, f"chatcmpl-{index:032x}-0", 1, prompt, sampling), 0.0)
        self.core.take_api_messages()

    def next_result(self, now_s: float) -> StepResult:
        """Keeps two steps in flight, as in production, and answers the older one."""
        while (plan := self.core.plan(now_s)) is not None:
            self._plans.append(plan)
        plan = self._plans.popleft()
        for assign in plan.assign:
            self._lengths[assign.slot] = len(assign.token_ids)
        return StepResult(plan.step, [self._answer(run) for run in plan.run], 0.001)

    def _answer(self, run: RunSlot) -> SlotTokens:
        length = self._lengths[run.slot]
        self._lengths[run.slot] = length + 1
        token = 3 + (length * 7919 + run.slot) % (VOCAB_SIZE - 3)
        return SlotTokens(run.slot, run.slot_epoch, length - NUM_PROMPT, length, [token], self._logprobs)


def us_per_token(
    wire: stage_wires.ResultWire, num_slots: int, num_tokens: int, *, top_logprobs: int | None = None
) -> float:
    """CPU microseconds of this process, all its threads, from the worker's result to the encoded deltas."""
    num_steps = max(1, num_tokens // num_slots)
    decoding = DecodingEngine(num_slots, num_steps + WARM_UP_STEPS, top_logprobs=top_logprobs)
    core, encoder = decoding.core, msgspec.msgpack.Encoder()
    spent_ns, clock_ns, num_deltas = 0, _clock_cost_ns(), 0
    for step in range(num_steps + WARM_UP_STEPS):
        now_s = step * 0.01
        result = decoding.next_result(now_s)
        started_ns = time.process_time_ns()
        core.commit(wire.carry(result), now_s)
        encoded = [encoder.encode(message) for _, message in core.take_api_messages()]
        ended_ns = time.process_time_ns()
        assert encoded, "every step has deltas"
        if step >= WARM_UP_STEPS:
            spent_ns += ended_ns - started_ns - clock_ns
            num_deltas += len(result.events)
    return spent_ns / num_deltas / 1000


def _clock_cost_ns() -> int:
    """What reading the clock adds to an interval: at one slot it would be a visible part of the figure."""
    readings = [time.process_time_ns() for _ in range(1001)]
    return (readings[-1] - readings[0]) // 1000


def empty_round_trips_us(kind: str, count: int, num_slots: int = EMPTY_STEP_SLOTS) -> list[float]:
    """Wall time from sending a plan to having its result, with the worker's end in another process."""
    with _echo_process(kind, num_slots) as turn:
        for step in range(1, 101):
            turn(StepPlan(step))
        times: list[float] = []
        for step in range(101, 101 + count):
            started_ns = time.perf_counter_ns()
            turn(StepPlan(step))
            times.append((time.perf_counter_ns() - started_ns) / 1000)
        return times


@contextmanager
def _echo_process(kind: str, num_slots: int) -> Iterator[Callable[[StepPlan], StepResult]]:
    """One turn of an engine that waits as the real one does."""
    with ExitStack() as stack:
        made = stack.enter_context(stage_wires.made_wire(kind, num_slots))
        child = stack.enter_context(stage_wires.echo_worker(made))
        wires = SocketPoller()
        stack.callback(wires.close)
        end = open_engine_wire_end(wires, made.for_engine, [os.dup(fd) for fd in made.engine_fds])

        def wait() -> WorkerHello | StepResult:
            while True:
                wires.wait(1000)
                if (message := end.receive()) is not None:
                    return message
                assert child.poll() is None, "the worker's end is alive"

        def turn(plan: StepPlan) -> StepResult:
            end.send(plan)
            result = wait()
            assert isinstance(result, StepResult), "hello comes once"
            assert result.step == plan.step, "a result comes for every plan, in order"
            return result

        wait()
        yield turn
        stack.callback(wires.drop, end)


def measure(
    rounds: int, tokens_per_run: dict[int, int], empty_steps: int, say: Callable[[str], None] = lambda _: None
) -> StageFigures:
    cpu: dict[str, dict[str, list[float]]] = {}
    trips: dict[str, dict[str, list[float]]] = {}
    for index in range(rounds):
        for num_slots, num_tokens in tokens_per_run.items():
            with stage_wires.all_wires(num_slots) as wires:
                for name, wire in wires.items():
                    figure = us_per_token(wire, num_slots, num_tokens)
                    cpu.setdefault(name, {}).setdefault(str(num_slots), []).append(figure)
                for name in ("zmq codec", "shm codec"):
                    figure = us_per_token(wires[name], num_slots, num_tokens // 4, top_logprobs=TOP_LOGPROBS)
                    cpu.setdefault(f"{name}, {TOP_LOGPROBS} logprobs", {}).setdefault(str(num_slots), []).append(figure)
        for kind in ("zmq", "shm"):
            times = empty_round_trips_us(kind, empty_steps)
            for percent in (50, 99):
                trips.setdefault(kind, {}).setdefault(f"p{percent}", []).append(percentile(times, percent))
        say(f"round {index + 1} of {rounds}")
    return StageFigures(_medians(cpu), _medians(trips), rounds, environment.describe_machine())


def _medians(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {k: statistics.median(v) for k, v in inner.items()} for name, inner in samples.items()}


def tables_of(figures: StageFigures) -> Sequence[Table]:
    slots = list(next(iter(figures.us_per_token.values())))
    cpu = Table(title="CPU µs per token, result to encoded delta", title_justify="left")
    cpu.add_column("wire")
    for count in slots:
        cpu.add_column(f"{count} slots", justify="right")
    for name, row in figures.us_per_token.items():
        cpu.add_row(name, *(f"{row[count]:.2f}" for count in slots))
    trips = Table(title="round trip of an empty step, µs", title_justify="left")
    for column in ("wire", "p50", "p99"):
        trips.add_column(column)
    for name, row in figures.round_trip_us.items():
        trips.add_row(name, f"{row['p50']:.0f}", f"{row['p99']:.0f}")
    return cpu, trips


def above_limit(figures: StageFigures) -> list[str]:
    """The wires between processes that cost more than they may, at the largest batch."""
    return [
        f"{name}: {row[str(SLOTS[-1])]:.2f} µs per token at {SLOTS[-1]} slots, and {BAR_US} is the bar"
        for name, row in figures.us_per_token.items()
        if name in BARRED_WIRES and row.get(str(SLOTS[-1]), 0.0) > BAR_US
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.engine.stage_cost", description="what the token stage costs")
    parser.add_argument("--rounds", type=int, default=5, help="how often each wire has its turn [5]")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    figures = measure(args.rounds, TOKENS_PER_RUN, EMPTY_STEPS, say=lambda line: console.print(line, style="dim"))
    for table in tables_of(figures):
        print_table(console, table)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    missed = above_limit(figures)
    for line in missed:
        console.print(line, style="red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

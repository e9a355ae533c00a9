"""What one step of the worker costs, without engine, wires and HTTP: `python -m benchmarks.cpu.step_cost`.

Machines that others use too are disturbed for moments at a time, so each figure is the median of several short bursts,
with the best one beside it, under a calibration line.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.calibration import calibrate
from onward.config import DEFAULT_MODEL, WorkerConfig
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.proto.sampling_params import SamplingParams
from onward.proto.speculative_config import MAX_DRAFT_TOKENS
from onward.proto.step import AssignSlot, RunSlot, StepPlan
from onward.worker.cpu_device import CpuDevice
from onward.worker.model_runner import ModelRunner
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

_BURSTS = 5
_STEPS = 12
_PRODUCTS = ("qkv", "o", "gate/up", "down", "head")


@dataclass(slots=True)
class StepCost:
    """Cost of one burst: time per step, and the cycles of each kind of work."""

    step_ms: float
    cycles: dict[str, int]

    def share(self, *kinds: str) -> float:
        return sum(self.cycles[kind] for kind in kinds) / max(1, sum(self.cycles.values()))


class WrongDraftProposer:
    """Factory and proposer in one. Every draft is wrong: it costs its row and gives nothing, so the cost of a step depends
    on the number of its rows alone."""

    bytes_per_block = 0
    draft_cost = 0.0

    def create(self, context: ProposerContext) -> "WrongDraftProposer":
        self._tokens, self._vocab_size = context.tokens, context.model.config.vocab_size
        return self

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        pass

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Greedy streams soon repeat themselves; what stands far from the newest token is hardly ever next."""
        newest = [int(self._tokens[request.slot, request.num_tokens - 1]) for request in draft_requests]
        far = [(token + self._vocab_size // 2) % self._vocab_size for token in newest]
        return [[token] * request.num_drafts for token, request in zip(far, draft_requests, strict=True)]

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        pass


class StepBench:
    def __init__(self, model: str, threads: int | None, max_streams: int, context: int) -> None:
        prepared = prepare(model, quantization="int8")
        self._vocab_size = prepared.config.vocab_size
        self._blocks = -(-(context + _BURSTS * _STEPS + 1 + MAX_DRAFT_TOKENS) // 16)
        settings = WorkerConfig(max_num_seqs=max_streams, num_kv_blocks=max_streams * self._blocks, threads=threads)
        self._chunk = settings.max_num_batched_tokens
        self._device = CpuDevice(prepared, settings, open_weights(prepared), WrongDraftProposer())
        self._runner = ModelRunner(prepared, settings, self._device)
        self._runner.warm_up(lambda message: None)
        self._epoch = 0

    def prefill(self, streams: int, context: int) -> list[StepCost]:
        """Prompts of random tokens, one stream after the other, in whole chunks. One cost per chunk."""
        rng = np.random.default_rng(0)
        costs: list[StepCost] = []
        for slot in range(streams):
            self._epoch += 1
            blocks = list(range(slot * self._blocks, (slot + 1) * self._blocks))
            tokens = rng.integers(0, self._vocab_size, context).tolist()
            sampling = SamplingParams(seed=0, temperature=0.0)
            assign = AssignSlot(slot, self._epoch, f"r{slot}", tokens, context, 0, blocks, sampling)
            self._runner.step(StepPlan(0, assign=[assign]))
            for start in range(0, context, self._chunk):
                costs.append(self._step([RunSlot(slot, self._epoch, min(self._chunk, context - start))]))
        return costs

    def decode(self, streams: int, context: int, num_drafts: int = 0) -> list[StepCost]:
        """Streams at about this context, one token each per step, behind wrong guesses. One cost per burst."""
        self.prefill(streams, context)
        runs = [RunSlot(slot, self._epoch - streams + 1 + slot, 1, [], num_drafts) for slot in range(streams)]
        bursts = [[self._step(runs) for _ in range(_STEPS)] for _ in range(_BURSTS)]
        return [StepCost(statistics.median(c.step_ms for c in burst), burst[-1].cycles) for burst in bursts]

    def _step(self, runs: list[RunSlot]) -> StepCost:
        started = time.perf_counter()
        self._runner.step(StepPlan(0, run=runs))
        return StepCost((time.perf_counter() - started) * 1000, self._device.phase_cycles())


def _report_decode(bench: StepBench, streams: int, context: int) -> None:
    costs = bench.decode(streams, context)
    median, best = statistics.median(c.step_ms for c in costs), min(c.step_ms for c in costs)
    fastest = min(costs, key=lambda c: c.step_ms)
    shares = ", ".join(f"{kind} {fastest.share(kind):.0%}" for kind in fastest.cycles)
    print(f"{streams:4} streams at {context}: {median:7.2f} ms a step ({best:.2f} at best), "
          f"{streams / median * 1000:6.0f} tok/s ({streams / best * 1000:.0f}); {shares}")  # fmt: skip


def _report_drafts(bench: StepBench, streams: int, context: int, drafts: list[int]) -> None:
    """What a row more costs, beside a step of one row for each stream."""
    costs = {n: statistics.median(c.step_ms for c in bench.decode(streams, context, n)) for n in [0, *drafts]}
    told = ", ".join(f"{n}: {costs[n]:.2f} ms ({(costs[n] - costs[0]) / (n * streams):+.2f} a row)" for n in drafts)
    print(f"{streams:4} streams at {context} with wrong guesses: {costs[0]:.2f} ms without; {told}")


def _report_prompt(bench: StepBench, length: int) -> None:
    costs = bench.prefill(1, length)
    total = sum(c.step_ms for c in costs)
    products = sum(c.step_ms * c.share(*_PRODUCTS) for c in costs)
    print(f"prompt of {length}: {total:.0f} ms, {length / total * 1000:.0f} tok/s, "
          f"{total / products:.2f} times its matrix products")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu.step_cost", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams, separated by commas")
    parser.add_argument("--context", type=int, default=180, help="tokens that each stream has behind it")
    parser.add_argument("--prompt", type=int, default=4096, help="length of one long prompt (0: none)")
    parser.add_argument("--drafts", default="", help="numbers of guesses, separated by commas: what each costs")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    streams = [int(part) for part in args.streams.split(",")]
    print(calibrate().line())
    bench = StepBench(args.model, args.threads, max(streams), max(args.context, args.prompt))
    for count in streams:
        _report_decode(bench, count, args.context)
    for count in streams if args.drafts else []:
        _report_drafts(bench, count, args.context, [int(part) for part in args.drafts.split(",")])
    if args.prompt:
        _report_prompt(bench, args.prompt)


if __name__ == "__main__":
    main()

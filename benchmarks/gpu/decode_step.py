"""Time of a decode step at the anchors' shapes, beside its floor, and where it goes.

python -m benchmarks.gpu.decode_step [--shapes 0.6b 8b] [--batches 1 256] [--contexts 512 1024] [--table]
"""

import argparse
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.decode import DecodeStep, plain_logits
from benchmarks.gpu.model import Model, Streams
from benchmarks.gpu.paged_case import DEVICE, error
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import capture, replay_ms

BYTES_PER_MS = 4.8e9
FLOPS_PER_MS = 790e9
BLOCK_SIZE = 16
ROOM = 64
"""Tokens that a measurement may add."""


def floor_ms(shape: Shape, batch: int, context: int) -> float:
    """Weights and KV at the memory's rate; where the products' operations take longer than the weights' bytes, those."""
    weights = max(shape.weight_bytes / BYTES_PER_MS, batch * shape.weight_bytes / FLOPS_PER_MS)
    return weights + batch * context * shape.kv_bytes_per_token / BYTES_PER_MS


class Measurement:
    """One shape, batch and context, to be stepped in several ways."""

    def __init__(self, shape: Shape, batch: int, context: int) -> None:
        self.shape, self.batch, self.context = shape, batch, context
        per_row = -(-(context + ROOM) // BLOCK_SIZE)
        self.model = Model(shape, batch * per_row, context + ROOM, BLOCK_SIZE)
        tables = torch.randperm(batch * per_row, device=DEVICE).int().view(batch, per_row)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.streams = Streams.start(tables, lengths, shape.vocab)

    def rewind(self) -> None:
        self.streams.lengths.fill_(self.context)

    def show(self, way: str, *, overlap: bool, with_table: bool) -> None:
        step = DecodeStep(self.model, self.streams, self.batch, overlap=overlap)
        work = {"torch": step.run, "ours": step.run_ours, "one row": step.run_one_row}[way]
        self.rewind()
        wrong = self._logits_error(step, work) if self.batch <= 4 else None
        graph = capture(work)
        times = []
        for _ in range(3):
            self.rewind()
            times.append(replay_ms(graph, 20))
        ms, floor = sorted(times)[1], floor_ms(self.shape, self.batch, self.context)
        checked = "" if wrong is None else f"   logits' error {wrong:.1e}"
        print(
            f"{self.shape.name} batch {self.batch} context {self.context} {way}{' overlapped' if overlap else ''}: "
            f"{ms:.3f} ms (floor {floor:.3f}, {ms / floor:.2f} of it), {self.batch / ms * 1000:.0f} tok/s{checked}",
            flush=True,
        )
        if with_table:
            self.rewind()
            print_shares(graph)

    def _logits_error(self, step: DecodeStep, work: Callable[[], None]) -> float:
        expected = plain_logits(step)
        work()
        self.rewind()
        return error(step.logits, expected)


def print_shares(graph: torch.cuda.CUDAGraph) -> None:
    """Overlapping kernels count the time in which they wait for each other, too."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_time_total > 0:
            times[event.name[:60]].append(event.device_time_total)
    whole = sum(map(sum, times.values()))
    for name, own in sorted(times.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"    {name:60s} {sum(own) / whole:6.1%}  {len(own) // 3:4d} x {sum(own) / len(own):8.2f} us")
    print(f"    all kernels {whole / 3000:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 256])
    parser.add_argument("--contexts", nargs="*", type=int, default=[512, 1024])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for name in args.shapes:
        for batch in args.batches:
            for context in args.contexts:
                torch.cuda.empty_cache()
                measurement = Measurement(SHAPES[name], batch, context)
                ways = [("torch", True), ("ours", True)]
                if batch == 1:
                    ways = [("torch", True), ("one row", False), ("one row", True)]
                for way, overlap in ways:
                    measurement.show(way, overlap=overlap, with_table=args.table and overlap)


if __name__ == "__main__":
    main()

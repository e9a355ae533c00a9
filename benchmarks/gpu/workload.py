"""The workload "256" over our kernels, without an engine: what the device side of a server can reach.

    python -m benchmarks.gpu.workload [--shapes 0.6b 8b] [--products torch ours] [--runs 3]

256 requests, prompts of U(100, 1024) random ids, outputs of U(100, 1024) tokens, temperature 0.6. Prompts are computed
first, packed into steps; then all streams decode, in graphs for batches of multiples of eight. When streams end, the others
move together, longest first. Each step's tokens are copied to the host; two steps are in flight.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.decode import DecodeStep
from benchmarks.gpu.model import Model, Streams
from benchmarks.gpu.paged_case import DEVICE
from benchmarks.gpu.prefill import PrefillStep
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import capture

BLOCK_SIZE = 16
MAX_LENGTH = 2048
MAX_ROWS = 16_384
GRANULE = 8


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    num_outputs: int


def requests(count: int = 256) -> list[Request]:
    random.seed(0)
    prompts = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(count)]
    return [Request(prompt, random.randint(100, 1024)) for prompt in prompts]


class Server:
    """Model, graphs and buffers that outlive a run."""

    def __init__(self, shape: Shape, num_streams: int, products: str) -> None:
        per_row = MAX_LENGTH // BLOCK_SIZE
        self.model = Model(shape, num_streams * per_row, MAX_LENGTH, BLOCK_SIZE)
        self.tables = torch.randperm(num_streams * per_row, device=DEVICE).int().view(num_streams, per_row)
        lengths = torch.ones(num_streams, dtype=torch.int32, device=DEVICE)
        self.streams = Streams.start(self.tables.clone(), lengths, shape.vocab)
        self.prefill = PrefillStep(self.model, MAX_ROWS)
        self.steps = {rows: DecodeStep(self.model, self.streams, rows) for rows in range(num_streams, 0, -GRANULE)}
        started = time.perf_counter()
        self.graphs = {
            rows: capture(step.run_ours if products == "ours" else step.run, warm_runs=1)
            for rows, step in self.steps.items()
        }
        torch.cuda.synchronize()
        print(f"{shape.name}: {len(self.graphs)} graphs captured in {time.perf_counter() - started:.1f} s", flush=True)

    def run(self, work: list[Request]) -> tuple[float, float]:
        """Seconds of all, and of the prompts."""
        started = time.perf_counter()
        self._prefill(work)
        torch.cuda.synchronize()
        prompts_s = time.perf_counter() - started
        self._decode([request.num_outputs - 1 for request in work], [len(r.prompt) for r in work])
        torch.cuda.synchronize()
        return time.perf_counter() - started, prompts_s

    def _prefill(self, work: list[Request]) -> None:
        self.streams.tables.copy_(self.tables)
        self.streams.inputs.positions.zero_()
        self.streams.lengths.copy_(torch.tensor([len(request.prompt) for request in work]))
        first = 0
        while first < len(work):
            end, rows = first, 0
            while end < len(work) and rows + len(work[end].prompt) <= MAX_ROWS:
                rows += len(work[end].prompt)
                end += 1
            prompts = [torch.tensor(request.prompt, device=DEVICE) for request in work[first:end]]
            self.prefill.run(prompts, first, self.streams)
            first = end

    def _decode(self, left: list[int], lengths: list[int]) -> None:
        """`left` are the tokens each row still wants."""
        host = [torch.empty(len(left), dtype=torch.int64, pin_memory=True) for _ in range(2)]
        done = [torch.cuda.Event() for _ in range(2)]
        order = sorted(range(len(left)), key=lambda row: -lengths[row])
        step = 0
        while order:
            self.streams.keep(torch.tensor(order).to(DEVICE, non_blocking=True))
            left, lengths = [left[row] for row in order], [lengths[row] for row in order]
            graph = self.graphs[-(-len(order) // GRANULE) * GRANULE]
            count = min(left)
            for _ in range(count):
                done[step % 2].synchronize()
                graph.replay()
                host[step % 2].copy_(self.streams.token_ids, non_blocking=True)
                done[step % 2].record()
                step += 1
            left = [n - count for n in left]
            order = [row for row, n in enumerate(left) if n > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--products", nargs="*", default=["torch"], choices=["torch", "ours"])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    work = requests()
    num_tokens = sum(request.num_outputs for request in work)
    for name in args.shapes:
        for products in args.products:
            torch.cuda.empty_cache()
            server = Server(SHAPES[name], len(work), products)
            server.run(work)
            found = [server.run(work) for _ in range(args.runs)]
            whole_s, prompts_s = (statistics.median(column) for column in zip(*found, strict=True))
            print(
                f"{name} ({products}): {num_tokens} tokens in {whole_s:.3f} s ({prompts_s:.3f} s of prompts): "
                f"{num_tokens / whole_s:.0f} tok/s; runs {', '.join(f'{num_tokens / s:.0f}' for s, _ in found)}",
                flush=True,
            )
            del server


if __name__ == "__main__":
    main()

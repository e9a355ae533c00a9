"""How busy the device is while streams decode, and with what, in the real engine and worker.

    python -m benchmarks.gpu.profile_step SHAPE [--streams 256] [--context 512 | --workload] [--steps 20] [--deterministic]

All streams run at once, each with a prompt of about that length; then some steps are recorded. With --workload lengths are
those of workload "256" when so many of its streams are left. Busy is the time in which any kernel runs; kernels that
overlap count in full in the shares.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from onward.bench.model_shapes import SHAPES, write_config
from onward.bench.offline import workload_256
from onward.llm import LLM, SamplingOptions

GROUPS = {
    "attention": ("_decode_attention", "_chunk_attention", "_rotate_and_store"),
    "norms": ("_add_norm",),
    "silu": ("_silu",),
    "sampling": ("_survey", "_pick_out", "_cut", "_resurvey", "_draw", "_log_totals"),
    "rows": ("_load_rows", "_append_sampled", "index", "Index", "Memcpy"),
    "products": ("gemm", "nvjet", "cutlass", "_linear", "_one_row", "cublas"),
}


def group_of(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "others")


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Length of their union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def show(title: str, found: profile, num_steps: int) -> None:
    cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    kernels = [e for e in found.events() or [] if e.device_type == cuda]
    intervals = [(e.time_range.start, e.time_range.end) for e in kernels]
    span_us = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    shares: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in kernels:
        shares[group_of(event.name)] += event.time_range.elapsed_us()
        names[event.name[:70]] += event.time_range.elapsed_us()
    busy = busy_us(intervals)
    print(f"{title}: {span_us / num_steps / 1000:.3f} ms a step, device busy {100 * busy / span_us:.1f} %", flush=True)
    for group, us in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"  {group:10s} {us / num_steps:8.1f} us a step, {100 * us / span_us:5.1f} %")
    for name, us in sorted(names.items(), key=lambda item: -item[1])[:12]:
        print(f"    {us / num_steps:8.1f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--streams", type=int, nargs="*", default=[256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--workload", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.shape)
        llm = LLM(
            folder, device="cuda", load_format="dummy", max_num_batched_tokens=16384, max_model_len=4096,
            deterministic=args.deterministic,
        )  # fmt: skip
        for num_streams in args.streams:
            record(llm, args, num_streams, generator)


def workload_lengths(num_streams: int) -> list[int]:
    """Returns the lengths of the streams of workload "256" that are left when at most `num_streams` are."""
    requests = workload_256()
    ends = sorted(request.num_output_tokens for request in requests)
    done = ends[-num_streams - 1] if num_streams < len(ends) else 0
    return [len(request.prompt) + done for request in requests if request.num_output_tokens > done]


def record(llm: LLM, args: argparse.Namespace, num_streams: int, generator: random.Random) -> None:
    lengths = workload_lengths(num_streams) if args.workload else [args.context] * num_streams
    # Each stream's beginning moves those before it by a token, so the first one's history grows the longest.
    prompts = [
        [generator.randint(0, 9999) for _ in range(max(1, length - len(lengths) // 2))] for length in lengths
    ]  # fmt: skip
    options = SamplingOptions(max_tokens=1500, temperature=0.6, ignore_eos=True, seed=1)
    streams = [llm.stream(prompt, options) for prompt in prompts]
    for stream in streams:
        next(stream)
    newest = streams[-1]
    for _ in range(10):
        next(newest)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(args.steps):
            next(newest)
        torch.cuda.synchronize()
    # What was in flight at the beginning and is at the end belongs to one step each.
    context = f"{min(lengths)} to {max(lengths)}" if args.workload else f"about {args.context}"
    show(f"{args.shape}, {len(lengths)} streams at {context}", found, args.steps)
    for stream in streams:
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    main()

"""Kernels on this machine's CUDA device: correctness at many shapes, then timings.

    python -m benchmarks.gpu.kernels [--check GROUP …] [--time GROUP …]

Groups are decode, chunk, small, linear and sampling, all of them if not said; --time also knows fp8, and tune-decode,
tune-ragged, tune-chunk, tune-one-row and tune-linear, which compare ways to cut the work up.

Needs torch with CUDA and Triton beside this repository; nothing is installed or downloaded.
"""

import argparse
import sys
import time

import torch
import triton

from benchmarks.gpu import correctness, timings

GROUPS = ["decode", "chunk", "small", "linear", "sampling"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", choices=GROUPS, default=GROUPS, metavar="GROUP")
    parser.add_argument("--time", nargs="*", choices=list(timings.FAMILIES), default=GROUPS, metavar="GROUP")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    started = time.perf_counter()
    total, failures = correctness.run(args.check)
    print(f"{total} checks, {failures} failures, {time.perf_counter() - started:.0f} s", flush=True)
    for group in args.time:
        started = time.perf_counter()
        timings.FAMILIES[group]()
        print(f"({group}: {time.perf_counter() - started:.0f} s)", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

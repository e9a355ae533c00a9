"""Benchmarks of Onward, run from the repository root. No part of the installed package.

docs/benchmarking.md lists them.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository root: the working directory of processes that are started as `python -m benchmarks.…`."""

"""`onward replay`: runs a recording of `onward serve --record` again, and shows the first answer that differs.

Exit status 0: all answers are equal. 1: one differs, or the file is damaged.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

from onward.engine.recording.recording_file import RecordingReader
from onward.engine.recording.replayer import ReplayResult, replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="recording that `onward serve --record FILE` has written"
    )


def run(args: argparse.Namespace) -> int:
    reader = RecordingReader(args.file)
    result = replay(reader)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in lines_of(result):
        console.print(line)
    if reader.fault is not None:
        console.print(f"{reader.fault}; what is whole before it was replayed")
    damaged = reader.fault is not None and not reader.truncated
    return 1 if result.difference is not None or damaged else 0


def lines_of(result: ReplayResult) -> list[str]:
    start, difference = result.begun, result.difference
    started_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start.wall_s))
    tokens = "true token ids" if start.has_real_tokens else "token ids disguised"
    lines = [f"engine {start.incarnation}, Onward {start.onward_version}, begun {started_at}, {tokens}"]
    if difference is None:
        lines.append(
            f"all {result.num_answers} answers are equal "
            f"({result.num_records} records, {result.seconds:.1f} s of the engine's time)"
        )
        if result.died is not None:
            lines.append(f"then the engine died, here as there: {result.died}")
        return lines
    return [
        *lines,
        f"record {difference.record} differs, {difference.seconds:.3f} s in, after step {difference.step}: "
        f"{difference.where}",
        f"  recorded  {difference.recorded}",
        f"  replayed  {difference.replayed}",
        f"{max(0, result.num_answers - 1)} answers before it are equal",
    ]

"""Times of device work: captured in a graph, so that launches cost nothing, and replayed; the median counts."""

import statistics
from collections.abc import Callable, Sequence

import torch


def capture(work: Callable[[], None], warm_runs: int = 2) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which runs some times beforehand so that everything is compiled and allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_runs):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, repeats: int = 10) -> float:
    """The median of single replays after two warm ones."""
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def time_ms(variants: Sequence[Callable[[], object]], rounds: int = 1, repeats: int = 10) -> float:
    """Returns the time of one call. `variants` do the same on different data, so that it is not in the cache."""

    def work() -> None:
        for _ in range(rounds):
            for variant in variants:
                variant()

    return replay_ms(capture(work), repeats) / (rounds * len(variants))

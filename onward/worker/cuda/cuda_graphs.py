"""Steps captured as CUDA graphs, each when it is needed for the second time: the first time compiles and loads kernels.

Without graphs every step just runs.
"""

from collections.abc import Callable, Hashable

import torch

from onward.kernels.batch_sizes import padded_batch_size


class CudaGraphs:
    def __init__(self, *, is_on: bool) -> None:
        self._is_enabled = is_on
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_enabled else None
        self._stream = torch.cuda.Stream() if self._is_enabled else None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Runs `work`, or replays its graph. `work` must be the same for a key each time, and use only tensors that
        keep their addresses."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key in self._seen and self._is_enabled:
            self._graphs[key] = self._capture(work)
            self._graphs[key].replay()
        else:
            self._seen.add(key)
            work()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures a graph without the garbage collection and synchronization that `torch.cuda.graph` begins with,
        because requests are waiting."""
        assert self._stream is not None, "graphs are captured only where they are on"
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph


def batch_sizes_up_to(max_count: int) -> list[int]:
    """Returns the padded sizes of all batches with at most `max_count` rows."""
    return sorted({padded_batch_size(count) for count in range(1, max_count + 1)})


def warmup_batch_sizes(max_count: int) -> list[int]:
    """Returns the batch sizes that get a graph before the first request: powers of two, and the largest. Other sizes
    get one when they are needed."""
    sizes, size = {padded_batch_size(max_count)}, 1
    while size < max_count:
        sizes.add(padded_batch_size(size))
        size *= 2
    return sorted(sizes)

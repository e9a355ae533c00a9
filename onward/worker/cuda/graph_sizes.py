"""Which batches get a graph of their own, and which of them before the first request."""

from onward.kernels.batch_sizes import padded_batch_size


def batch_sizes_up_to(max_count: int) -> list[int]:
    """All batches that any number of rows up to this may run in."""
    return sorted({padded_batch_size(count) for count in range(1, max_count + 1)})


def warmup_batch_sizes(max_count: int) -> list[int]:
    """Those worth a graph before the first request: doubling, and the largest. The rest come when they are needed."""
    sizes, size = {padded_batch_size(max_count)}, 1
    while size < max_count:
        sizes.add(padded_batch_size(size))
        size *= 2
    return sorted(sizes)

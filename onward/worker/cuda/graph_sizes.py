"""Which batches get a graph of their own, and which are tried before the first request.

Others run in the next larger graph, with rows that belong to nobody.
"""

_SMALL = (1, 2, 4)
_GRANULE = 8
_COARSE_FROM, _COARSE = 256, 32
_LEAST_PROMPT = 256


def padded(count: int) -> int:
    """The batch that `count` rows run in."""
    assert count > 0
    for size in _SMALL:
        if count <= size:
            return size
    granule = _GRANULE if count <= _COARSE_FROM else _COARSE
    return -(-count // granule) * granule


def sizes_up_to(max_count: int) -> list[int]:
    """All batches that any number of rows up to this may run in."""
    return sorted({padded(count) for count in range(1, max_count + 1)})


def warm_sizes(max_count: int) -> list[int]:
    """Those worth a graph before the first request: doubling, and the largest. The rest come when they are needed."""
    sizes, size = {padded(max_count)}, 1
    while size < max_count:
        sizes.add(padded(size))
        size *= 2
    return sorted(sizes)


def prompt_sizes(max_tokens: int) -> list[int]:
    """Steps with prompts that are worth a rehearsal: the largest, and each a quarter of the one before. They have no
    graphs, but their products have kernels of their own."""
    sizes = [max_tokens]
    while sizes[-1] // 4 >= _LEAST_PROMPT:
        sizes.append(sizes[-1] // 4)
    return sizes

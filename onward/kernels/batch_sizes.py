"""The sizes of batches for which there are kernels and graphs. Other batches use the next larger size."""

_SMALL = (1, 2, 4)
_GRANULE = 8
_COARSE_FROM, _COARSE = 256, 32


def padded_batch_size(count: int) -> int:
    """Returns the batch size for `count` rows."""
    assert count > 0
    for size in _SMALL:
        if count <= size:
            return size
    granule = _GRANULE if count <= _COARSE_FROM else _COARSE
    return -(-count // granule) * granule

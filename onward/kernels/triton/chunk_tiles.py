"""Cuts chunks of prompts into the tiles of chunk attention. Plain numpy: the host prepares the tiles for each step."""

from collections.abc import Sequence

import numpy as np


def chunk_tiles(chunks: Sequence[tuple[int, int, int]], group: int, rows: int) -> np.ndarray:
    """Returns tiles, int32 [tiles, 4]: first row of the batch, tokens, request (row of the block tables), position of
    the first token.

    `chunks` are (request, position of the first token, tokens), in the order of the batch's rows. A tile has `rows`
    query rows, `group` of them for each token. Tiles with the longest history come first, so that the device does not
    end on one.
    """
    per_tile = max(1, rows // group)
    parts: list[np.ndarray] = []
    row = 0
    for request, start, count in chunks:
        offsets = np.arange(0, count, per_tile, dtype=np.int32)
        part = np.empty((len(offsets), 4), np.int32)
        part[:, 0] = row + offsets
        part[:, 1] = np.minimum(count - offsets, per_tile)
        part[:, 2] = request
        part[:, 3] = start + offsets
        parts.append(part)
        row += count
    table = np.concatenate(parts)
    return table[np.argsort(-table[:, 3], kind="stable")]

"""What all families of layers exchange between ranks: the rows of the embedding, and the logits of the head.

The products that are added up need no class: `RankExchange.sum` after the product.
"""

import torch

from onward.models.sharding.rank_exchange import RankExchange
from onward.models.sharding.shard_plan import Shard


class VocabularyParallel:
    """The vocabulary of a model whose ranks each have a part of it."""

    def __init__(self, vocab_size: int, exchange: RankExchange) -> None:
        self._exchange = exchange
        num_ranks = exchange.shard.num_ranks
        self._shares = [Shard(rank, num_ranks).share(vocab_size) for rank in range(num_ranks)]
        self._own = self._shares[exchange.shard.rank]

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of rank 0's tokens at all ranks. `embedding` is this rank's part; `token_ids` are replaced by
        those of rank 0."""
        self._exchange.broadcast(token_ids)
        local = token_ids.long() - self._own.start
        is_elsewhere = (local < 0) | (local >= len(self._own))
        rows = embedding[local.clamp(0, len(self._own) - 1)].masked_fill(is_elsewhere[:, None], 0.0)
        self._exchange.sum(rows)
        return rows

    def join_logits(self, part: torch.Tensor, logits: torch.Tensor) -> bool:
        """Writes the logits of the whole vocabulary to `logits` at rank 0, and returns whether this is rank 0. Parts travel
        in equal shapes, because those of ranks differ in width."""
        wide = part.new_zeros((len(part), max(map(len, self._shares))))
        wide[:, : part.shape[1]] = part
        parts = self._exchange.gather(wide)
        for share, one in zip(self._shares, parts, strict=False):
            logits[:, share.start : share.stop] = one[:, : len(share)]
        return bool(parts)

"""Makes a float model whose weights are one rank's part of those of the whole model compute with the other ranks. The
layers know nothing of it: their products are wrapped from outside."""

from collections.abc import Callable

import torch

from onward.models.layers.float_layers import FloatModel
from onward.models.sharding.parallel_layers import VocabularyParallel
from onward.models.sharding.rank_exchange import RankExchange

Product = Callable[[torch.Tensor], torch.Tensor]


def make_parallel(model: FloatModel, vocab_size: int, exchange: RankExchange) -> None:
    """`vocab_size` is that of the whole model."""
    vocabulary = VocabularyParallel(vocab_size, exchange)
    embedding, head = model.embedding, model.head

    def embed_tokens(token_ids: torch.Tensor) -> torch.Tensor:
        return vocabulary.embed(embedding, token_ids)

    def joined_head(hidden: torch.Tensor) -> torch.Tensor:
        part = head(hidden)
        logits = part.new_empty((len(part), vocab_size))
        return logits if vocabulary.join_logits(part, logits) else part

    model.embed_tokens, model.head = embed_tokens, joined_head
    for layer in model.layers:
        layer.o, layer.mlp = _summed(layer.o, exchange), _summed(layer.mlp, exchange)


def _summed(product: Product, exchange: RankExchange) -> Product:
    """Returns a product by inputs: each rank computes an addend of the result."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        total = product(x)
        exchange.sum(total)
        return total

    return summed

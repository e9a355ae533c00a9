"""Makes the weights of one rank on a device add up their products with those of the other ranks."""

from onward.models.layers.device.model_weights import ModelWeights
from onward.models.sharding.rank_exchange import RankExchange


def add_up_products(weights: ModelWeights, exchange: RankExchange) -> None:
    """Marks the matrices that are divided by inputs (`shard_plan`)."""
    for layer in weights.layers:
        layer.o.add_up = layer.down.add_up = exchange.sum

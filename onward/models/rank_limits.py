"""Which models can run on how many ranks. Does no I/O."""

from onward.errors import StartupError
from onward.kernels.weight_formats import OUTPUT_UNIT
from onward.models.sharding.shard_plan import max_num_ranks
from onward.proto.model import ModelConfig
from onward.proto.rank import MAX_RANKS


def check_num_ranks(num_ranks: int, model: str, config: ModelConfig, quantization: str) -> None:
    """Raises `StartupError` if the model cannot run on `num_ranks` ranks. `quantization` is never `auto`."""
    if num_ranks == 1:
        return
    if quantization != "int8":
        _check_float_ranks(num_ranks, model, config, quantization)
        return
    limit = min(MAX_RANKS, config.hidden_size // OUTPUT_UNIT)
    if num_ranks > limit:
        raise StartupError(
            f"--tensor-parallel {num_ranks}: the matrices of {model} have parts for at most {limit} ranks, of "
            f"{OUTPUT_UNIT} outputs each; a further rank would have nothing to compute"
        )


def _check_float_ranks(num_ranks: int, model: str, config: ModelConfig, quantization: str) -> None:
    if quantization != "none":
        raise StartupError(
            f"--tensor-parallel {num_ranks} is for int8 or unquantized weights; start with another --quantization than "
            f"{quantization}"
        )
    if config.qk_norm_is_whole:
        raise StartupError(
            f"--tensor-parallel {num_ranks}: {model} has norms over the values of all heads (qk_norm_is_whole), which "
            "ranks with a part of the heads cannot compute; start with --quantization int8 or one rank"
        )
    limit = min(MAX_RANKS, max_num_ranks(config))
    if num_ranks > limit:
        raise StartupError(
            f"--tensor-parallel {num_ranks}: {model} has parts for at most {limit} ranks. Each needs a KV head, of which "
            f"there are {config.num_kv_heads}, and a part of the MLP and of the vocabulary"
        )

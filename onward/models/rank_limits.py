"""Which models can run on how many ranks. Does no I/O."""

from onward.errors import StartupError
from onward.kernels.weight_formats import OUTPUT_UNIT
from onward.proto.model import ModelConfig
from onward.proto.rank import MAX_RANKS


def check_num_ranks(num_ranks: int, model: str, config: ModelConfig, quantization: str) -> None:
    """Raises `StartupError` if the model cannot run on `num_ranks` ranks. `quantization` is never `auto`."""
    if num_ranks == 1:
        return
    if quantization != "int8":
        raise StartupError(
            f"--tensor-parallel {num_ranks} is for int8 weights, and those of {model} are floats; start with "
            "--quantization int8"
        )
    limit = min(MAX_RANKS, config.hidden_size // OUTPUT_UNIT)
    if num_ranks > limit:
        raise StartupError(
            f"--tensor-parallel {num_ranks}: the matrices of {model} have parts for at most {limit} ranks, of "
            f"{OUTPUT_UNIT} outputs each; a further rank would have nothing to compute"
        )

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onward.errors import StartupError
from onward.models.loader.gguf_rope import fit_rope_scaling
from onward.models.rope_scaling import llama3_divisors
from onward.proto.model import Llama3Rope

SCALINGS = [
    (Llama3Rope(8.0, 1.0, 4.0, 8192), 500000.0, 128),
    (Llama3Rope(32.0, 1.0, 4.0, 8192), 500000.0, 64),
    (Llama3Rope(4.0, 1.0, 2.0, 1024), 10000.0, 128),
    (Llama3Rope(16.0, 2.0, 12.0, 4096), 500000.0, 128),
]


def stored(scaling: Llama3Rope, theta: float, head_dim: int) -> list[float]:
    return np.asarray(llama3_divisors(scaling, theta, head_dim), dtype=np.float32).tolist()


@pytest.mark.parametrize(("scaling", "theta", "head_dim"), SCALINGS)
def test_divisors_are_those_of_transformers(scaling: Llama3Rope, theta: float, head_dim: int) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(plain / scaled.numpy(), llama3_divisors(scaling, theta, head_dim), rtol=1e-5)


@pytest.mark.parametrize(("scaling", "theta", "head_dim"), SCALINGS)
def test_scaling_is_recovered_from_its_divisors(scaling: Llama3Rope, theta: float, head_dim: int) -> None:
    divisors = stored(scaling, theta, head_dim)
    recovered = fit_rope_scaling(divisors, theta, head_dim)
    assert recovered is not None
    np.testing.assert_allclose(llama3_divisors(recovered, theta, head_dim), divisors, rtol=1e-4)


def test_usual_scaling_is_recovered_exactly() -> None:
    scaling, theta, head_dim = SCALINGS[1]
    assert fit_rope_scaling(stored(scaling, theta, head_dim), theta, head_dim) == scaling


def test_divisors_of_one_are_no_scaling() -> None:
    assert fit_rope_scaling([1.0] * 32, 10000.0, 64) is None


@pytest.mark.parametrize("divisors", [[1.0, 2.0] * 16, [8.0] + [1.0] * 31, [float(i + 1) for i in range(32)]])
def test_divisors_of_another_kind_are_refused(divisors: list[float]) -> None:
    with pytest.raises(StartupError, match="rope_freqs"):
        fit_rope_scaling(divisors, 10000.0, 64)


def test_wrong_number_of_divisors_is_refused() -> None:
    with pytest.raises(StartupError, match="16 values, expected 32"):
        fit_rope_scaling([1.0] * 16, 10000.0, 64)

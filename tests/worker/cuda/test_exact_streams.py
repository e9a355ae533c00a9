"""`benchmarks.gpu.exactness` on the device: with `--deterministic` a stream is the same however it is computed.

Real shapes, since which kernel computes a product, and how it is cut up, is chosen by its size.
"""

import pytest

from benchmarks.gpu.exactness import Setup, check_exactness, dummy_model
from benchmarks.gpu.exactness_lines import LINES
from benchmarks.gpu.exactness_requests import Requests
from onward.bench.model_shapes import SHAPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b"])
def test_streams_are_the_same_however_they_are_computed(shape: str) -> None:
    requests = Requests(num_streams=18, prompt_len=500, num_tokens=96, vocab_size=SHAPES[shape]["vocab_size"])
    with dummy_model(shape) as folder:
        results = check_exactness(Setup(folder, "cuda", ["--load-format", "dummy"], requests), ["mixed"], list(LINES))
    assert len(results) == 1 + len(LINES), "the base run, and all lines"
    assert [str(result) for result in results.values() if not result.passed] == []

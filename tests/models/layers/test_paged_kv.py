"""Which type keys and values are kept in."""

import msgspec
import numpy as np

from onward.models.layers.paged_kv import kv_dtype
from tests.worker.small_int8 import CONFIG


def test_int8_models_keep_int8_kv_unless_their_keys_have_biases() -> None:
    assert kv_dtype(CONFIG, "int8") == np.int8
    assert kv_dtype(msgspec.structs.replace(CONFIG, qkv_bias=True), "int8") == np.float32


def test_float_models_keep_float32_kv() -> None:
    assert kv_dtype(CONFIG, "none") == np.float32

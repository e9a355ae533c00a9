"""Whether a new server may use the KV memory of an old one."""

import dataclasses
from typing import Any

import msgspec
import pytest

from onward.config import ServeConfig
from onward.proto.adoption import MemoryFormat
from onward.proto.model import DynamicRope, PreparedModel
from onward.supervisor.memory_format import format_differences, is_length_unknown, memory_format
from tests.supervisor.stand_ins import SHAPE

CONFIG = ServeConfig()
MODEL = PreparedModel("small", "", SHAPE, "float32", "none", "print", [], None, None, None, None, [])
FORMAT = memory_format(CONFIG, MODEL, 512)


def test_equal_servers_have_equal_formats() -> None:
    assert format_differences(FORMAT, memory_format(CONFIG, MODEL, 512)) == []


def test_a_new_server_that_leaves_the_number_of_blocks_open_takes_over_those_that_are_there() -> None:
    assert format_differences(FORMAT, memory_format(CONFIG, MODEL, None)) == []
    assert format_differences(FORMAT, memory_format(CONFIG, MODEL, 600)) == ["num_kv_blocks is 512 there and 600 here"]


OTHER_VALUES: dict[str, Any] = {
    "device": "cuda",
    "model_fingerprint": "another",
    "kernel_version": 999,
    "kv_layout": "another",
    "block_size": 32,
    "num_kv_blocks": 7,
    "hash_table_format": 999,
}


@pytest.mark.parametrize("field", MemoryFormat.__struct_fields__)
def test_each_field_that_differs_is_named(field: str) -> None:
    value = OTHER_VALUES[field]
    other = msgspec.structs.replace(FORMAT, **{field: value})
    assert format_differences(other, FORMAT) == [f"{field} is {value} there and {getattr(FORMAT, field)} here"]


def with_config(**changes: Any) -> PreparedModel:
    return msgspec.structs.replace(MODEL, config=msgspec.structs.replace(MODEL.config, **changes))


@pytest.mark.parametrize("changes", [{"num_layers": 99}, {"num_kv_heads": 99}, {"head_dim": 96}])
def test_the_shape_of_keys_and_values_is_part_of_the_layout(changes: dict[str, int]) -> None:
    [difference] = format_differences(FORMAT, memory_format(CONFIG, with_config(**changes), 512))
    assert difference.startswith("kv_layout is ")


def test_where_keys_depend_on_the_longest_context_it_has_to_be_given_and_equal() -> None:
    model = with_config(rope_scaling=DynamicRope(2.0, 1024))
    assert is_length_unknown(CONFIG, model)
    assert not is_length_unknown(CONFIG, MODEL)
    short, long = (dataclasses.replace(CONFIG, max_model_len=length) for length in (2048, 4096))
    assert not is_length_unknown(short, model)
    assert format_differences(memory_format(short, model, 8), memory_format(long, model, 8)) != []
    assert format_differences(memory_format(short, model, 8), memory_format(short, model, 8)) == []

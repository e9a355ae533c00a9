"""Peers that cannot exchange KV are told what differs."""

import msgspec
import pytest

from onward.pd import handoff_errors, layout
from onward.proto.kv_transfer import KvLayout
from tests.pd.messages import LAYOUT


def test_equal_layouts_have_no_difference() -> None:
    assert layout.layout_difference(LAYOUT, msgspec.structs.replace(LAYOUT)) is None


@pytest.mark.parametrize("field", KvLayout.__struct_fields__)
def test_a_difference_in_any_field_is_named_with_both_values(field: str) -> None:
    other = "other" if isinstance(getattr(LAYOUT, field), str) else 99
    difference = layout.layout_difference(LAYOUT, msgspec.structs.replace(LAYOUT, **{field: other}))
    assert difference == f"{field} is {getattr(LAYOUT, field)!r} here and {other!r} there"


def test_all_differences_are_named_at_once() -> None:
    difference = layout.layout_difference(LAYOUT, msgspec.structs.replace(LAYOUT, dtype="bfloat16", block_size=32))
    assert difference == "dtype is 'float16' here and 'bfloat16' there; block_size is 16 here and 32 there"


def test_a_layout_that_does_not_fit_is_not_worth_another_try() -> None:
    error = handoff_errors.layout_mismatch("dtype is 'float16' here and 'bfloat16' there")
    assert (error.code, error.retryable, error.stage) == ("pd_layout_mismatch", False, "prefill")
    assert error.message.startswith("PD Error: ")

"""Reads from `quantization_config` of a checkpoint's `config.json` how its weights are stored.

Unsupported schemes are refused here by name, from `config.json` alone. `models.loader.quantized_layout` checks the
tensors, and `models.loader.quantized_tensors` reads them.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from onward.errors import StartupError
from onward.models.families.config_fields import ConfigFields, unsupported

Method = Literal["fp8", "awq", "gptq", "compressed-tensors"]
METHODS: tuple[Method, ...] = get_args(Method)
_FIELD = "quantization_config"
_ORDERS = {None: False, False: False, "static": False, "weight": False, True: True, "group": True, "dynamic": True}
"""Values of `actorder` of compressed-tensors, and whether inputs keep the groups in which they were quantized."""
COMPRESSED_LAYOUTS = {
    "pack-quantized": True, "int-quantized": False, "naive-quantized": False, "float-quantized": False,
}  # fmt: skip
"""Values of `format` of compressed-tensors, and whether several integers are stored in one of 32 bits."""
GROUP_UNIT = 32
"""The kernels have scales for 32 inputs, so a group must be a multiple of that."""


class CheckpointScheme(msgspec.Struct, frozen=True):
    method: Method
    num_bits: int
    group_size: int | None = None
    """Inputs that share a scale, for integers; None: all of an output."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, for fp8; None: a scale for each output, or one for the tensor."""
    zeros_minus_one: bool = False
    """Zero points are stored less one, as in GPTQ's first layout."""
    is_symmetric: bool = False
    """All zero points of a GPTQ checkpoint are the middle level."""
    is_reordered: bool = False
    """Inputs are in groups in another order than their own, which a tensor of each matrix says."""
    is_float: bool = False
    is_packed: bool = True
    """Several integers are stored in one of 32 bits."""

    @property
    def main_part(self) -> str:
        """The last part of the name of the tensor that has the levels of a matrix."""
        if self.method in ("awq", "gptq"):
            return "qweight"
        return "weight_packed" if self.is_packed and not self.is_float else "weight"

    @property
    def scale_parts(self) -> tuple[str, ...]:
        if self.method in ("awq", "gptq"):
            return ("scales",)
        return ("weight_scale", "weight_scale_inv") if self.is_float else ("weight_scale",)

    @property
    def other_parts(self) -> tuple[str, ...]:
        """The last parts of the names of all other tensors of a matrix."""
        match self.method:
            case "awq":
                return (*self.scale_parts, "qzeros")
            case "gptq":
                return (*self.scale_parts, "qzeros", "g_idx")
            case _:
                return (*self.scale_parts, "weight_zero_point", "weight_shape", "weight_g_idx")

    @property
    def name(self) -> str:
        return f"{self.method}, {'fp8' if self.is_float else f'int{self.num_bits}'}"


def parse_scheme(raw: Mapping[str, Any]) -> CheckpointScheme | None:
    """Returns the scheme of a `config.json`; None if weights are floats. Raises `StartupError` if it is not
    supported."""
    fields = ConfigFields(raw).section(_FIELD)
    method = fields.get("quant_method")
    if method is None and not raw.get(_FIELD):
        return None
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
    if not isinstance(method, str) or method not in METHODS:
        name = str(method)[:80] if method else "unknown"
        raise unsupported(f"{_FIELD} (method {name}); supported are {', '.join(METHODS)}")
    return readers[method](fields)


def _fp8(fields: ConfigFields) -> CheckpointScheme:
    fields.choice("fmt", {"e4m3": None, "float8_e4m3fn": None}, "e4m3")
    return CheckpointScheme("fp8", 8, block=_block(fields, "weight_block_size"), is_float=True)


def _block(fields: ConfigFields, key: str) -> tuple[int, int] | None:
    value = fields.get(key)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(size, int) and 0 < size <= 1 << 20 for size in value):
        raise fields.wrong(key, value)
    return value[0], value[1]


def _awq(fields: ConfigFields) -> CheckpointScheme:
    fields.choice("version", {"gemm": None, "GEMM": None}, "gemm")
    return CheckpointScheme("awq", _bits(fields, "bits", (4,)), _group_size(fields))


def _gptq(fields: ConfigFields) -> CheckpointScheme:
    fields.refuse("is_marlin_format", "dynamic")
    fields.choice("pack_dtype", {"int32": None}, "int32")
    size = _group_size(fields)
    return CheckpointScheme(
        "gptq",
        _bits(fields, "bits", (4, 8)),
        size,
        zeros_minus_one=fields.choice("checkpoint_format", {"gptq": True, "gptq_v2": False}, "gptq"),
        is_symmetric=fields.flag("sym"),
        # With a single group, the order has no effect.
        is_reordered=fields.flag("desc_act") and size is not None,
    )


def _bits(fields: ConfigFields, key: str, choices: tuple[int, ...]) -> int:
    bits = fields.integer(key)
    if bits not in choices:
        raise unsupported(f"{_FIELD}.{key} {bits}; supported are {', '.join(map(str, choices))}")
    return bits


def _group_size(fields: ConfigFields) -> int | None:
    size = fields.get("group_size")
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise fields.wrong("group_size", size)
    if size % GROUP_UNIT:
        raise unsupported(f"{_FIELD}: group_size {size}, not a multiple of {GROUP_UNIT}")
    return size


def _compressed_tensors(fields: ConfigFields) -> CheckpointScheme:
    fields.refuse("transform_config")
    if (sparsity := fields.section("sparsity_config").get("format")) not in (None, "dense"):
        raise unsupported(f"{_FIELD}.sparsity_config ({str(sparsity)[:80]})")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise StartupError(f"the model's config is wrong: `{_FIELD}.config_groups` must be an object that is not empty")
    if len(groups) > 1:
        raise unsupported(f"{_FIELD}.config_groups with {len(groups)} groups")
    (group,) = groups.values()
    if not isinstance(group, dict):
        raise StartupError(f"the model's config is wrong: `{_FIELD}.config_groups` must have objects")
    weights = ConfigFields(group, f"{_FIELD}.config_groups.").section("weights")
    is_packed = fields.choice("format", COMPRESSED_LAYOUTS, "")
    is_float = weights.choice("type", {"int": False, "float": True}, "int")
    order = weights.get("actorder")
    if isinstance(order, (list, dict)) or order not in _ORDERS:
        raise unsupported(f"{_FIELD}: actorder {str(order)[:40]!r}")
    bits = _bits(weights, "num_bits", (8,) if is_float or not is_packed else (4, 8))
    strategy = weights.choice("strategy", {name: name for name in ("tensor", "channel", "group", "block")}, "")
    block = _block(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and (block is None or not is_float):
        raise unsupported(f"{_FIELD}: strategy 'block' without block_structure or for integers")
    if strategy == "group" and is_float:
        raise unsupported(f"{_FIELD}: strategy 'group' for floats")
    size = _group_size(weights) if strategy == "group" else None
    return CheckpointScheme(
        "compressed-tensors",
        bits,
        size,
        block,
        is_reordered=_ORDERS[order] and size is not None,
        is_float=is_float,
        is_packed=is_packed,
    )

"""Checks the stored tensors of a quantized checkpoint against its scheme, from the headers of its files alone.

Every part of a matrix must have the type and the shape that the other parts and the scheme imply, and no two stored
tensors may stand for one matrix. `quantized_tensors` relies on that: it unpacks without further checks of types and
shapes. This module reads no tensors.
"""

import math
from collections.abc import Collection, Iterator, Mapping

from onward.errors import StartupError
from onward.models.checkpoint_quantization import GROUP_UNIT, CheckpointScheme
from onward.models.loader.safetensors_header import FLOAT_TYPES, TensorLocation
from onward.models.tensor_names import Shape

_FLOAT8 = "F8_E4M3"
_UNREAD_PARTS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")
"""Scales of activations and of KV. The server computes its own."""
_INDEX_TYPES = ("I32", "I64")


def logical_names(stored: Collection[str], scheme: CheckpointScheme) -> Iterator[str]:
    """Yields the names of the float tensors that the stored tensors stand for."""
    for name in stored:
        module, _, part = name.rpartition(".")
        if part == scheme.main_part:
            yield f"{module}.weight"
        elif part not in scheme.other_parts and part not in _UNREAD_PARTS:
            yield name


def logical_shapes(stored: Mapping[str, TensorLocation], scheme: CheckpointScheme) -> dict[str, Shape]:
    """Returns the shapes of the float tensors that the stored tensors stand for. Raises `StartupError`, which names the
    file and the tensor, if stored tensors do not fit each other."""
    found: dict[str, Shape] = {}
    for name in logical_names(stored, scheme):
        module, _, part = name.rpartition(".")
        is_matrix = part == "weight" and f"{module}.{scheme.main_part}" in stored
        if is_matrix and _is_quantized(module, stored, scheme):
            found[name] = _check_matrix(module, stored, scheme)
        else:
            found[name] = stored[name].shape
    _check_no_lonely_parts(stored, scheme)
    return found


def is_part(name: str, stored: Collection[str], scheme: CheckpointScheme) -> bool:
    """Returns whether a stored tensor is a part of a quantized matrix, whose type is checked here."""
    module, _, part = name.rpartition(".")
    if part in _UNREAD_PARTS or part in scheme.other_parts:
        return True
    return part == scheme.main_part and _is_quantized(module, stored, scheme)


def _is_quantized(module: str, stored: Collection[str], scheme: CheckpointScheme) -> bool:
    """Returns whether the main part of a module holds quantized weights. Where it is called `weight`, floats have the
    same name, and only the scales tell them apart."""
    return scheme.main_part != "weight" or any(f"{module}.{part}" in stored for part in scheme.scale_parts)


def _check_no_lonely_parts(stored: Mapping[str, TensorLocation], scheme: CheckpointScheme) -> None:
    for name, location in stored.items():
        module, _, part = name.rpartition(".")
        if part in scheme.other_parts and f"{module}.{scheme.main_part}" not in stored:
            raise _unusable(location, name, f"belongs to {module}.{scheme.main_part}, which the checkpoint lacks")


def _check_matrix(module: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme) -> Shape:
    """Returns [outputs, inputs] of a matrix whose parts fit each other."""
    main = f"{module}.{scheme.main_part}"
    location = stored[main]
    if len(location.shape) != 2 or 0 in location.shape:
        raise _unusable(location, main, f"has the shape {list(location.shape)}, and a matrix is expected")
    if f"{module}.weight" in stored and main != f"{module}.weight":
        raise _unusable(stored[f"{module}.weight"], f"{module}.weight", f"stands for the same matrix as {main}")
    if scheme.is_float:
        return _check_float8(module, stored, scheme)
    return _check_integers(module, stored, scheme)


def _check_float8(module: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme) -> Shape:
    name = f"{module}.weight"
    _check(stored[name], name, (_FLOAT8,), stored[name].shape)
    outputs, inputs = stored[name].shape
    scales = [f"{module}.{part}" for part in scheme.scale_parts if f"{module}.{part}" in stored]
    if len(scales) > 1:
        raise _unusable(stored[scales[1]], scales[1], f"stands for the same scales as {scales[0]}")
    location = stored[scales[0]]
    if scheme.block is None:
        _check_scales(location, scales[0], outputs, 1)
    else:
        rows, columns = scheme.block
        _check(location, scales[0], FLOAT_TYPES, (-(-outputs // rows), -(-inputs // columns)))
    return outputs, inputs


def _check_integers(module: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme) -> Shape:
    main = f"{module}.{scheme.main_part}"
    per_word = 32 // scheme.num_bits if scheme.is_packed else 1
    rows, columns = stored[main].shape
    _check(stored[main], main, ("I32",) if scheme.is_packed else ("I8",), (rows, columns))
    match scheme.method:
        case "awq":
            outputs, inputs = columns * per_word, rows
        case "gptq":
            outputs, inputs = columns, rows * per_word
        case _:
            outputs, inputs = rows, columns * per_word
    size = scheme.group_size or inputs
    if inputs % size or inputs % GROUP_UNIT:
        raise _unusable(
            stored[main], main, f"has {inputs} inputs, not a multiple of {GROUP_UNIT} and of the group size {size}"
        )
    if scheme.method == "compressed-tensors":
        _check_compressed_parts(module, stored, scheme, (outputs, inputs), inputs // size)
    else:
        _check_column_parts(module, stored, scheme, (outputs, inputs), inputs // size)
    return outputs, inputs


def _check_column_parts(
    module: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme, shape: Shape, groups: int
) -> None:
    """Checks the other parts of AWQ and GPTQ, which have the outputs in their columns."""
    outputs, inputs = shape
    scales, zeros, order = f"{module}.scales", f"{module}.qzeros", f"{module}.g_idx"
    main = f"{module}.{scheme.main_part}"
    for name in (scales, zeros):
        if name not in stored:
            raise _unusable(stored[main], main, f"lacks {name}")
    per_word = 32 // scheme.num_bits
    _check(stored[scales], scales, FLOAT_TYPES, (groups, outputs))
    if outputs % per_word:
        raise _unusable(stored[main], main, f"has {outputs} outputs, not a multiple of {per_word}")
    _check(stored[zeros], zeros, ("I32",), (groups, outputs // per_word))
    _check_order(order, stored, scheme, main, inputs)


def _check_order(
    order: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme, main: str, inputs: int
) -> None:
    if order in stored:
        _check(stored[order], order, _INDEX_TYPES, (inputs,))
    elif scheme.is_reordered:
        raise _unusable(stored[main], main, f"lacks {order}, though the config says that inputs are reordered")


def _check_compressed_parts(
    module: str, stored: Mapping[str, TensorLocation], scheme: CheckpointScheme, shape: Shape, groups: int
) -> None:
    outputs, inputs = shape
    scales, zeros, order = f"{module}.weight_scale", f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    main, size = f"{module}.{scheme.main_part}", f"{module}.weight_shape"
    if scales not in stored:
        raise _unusable(stored[main], main, f"lacks {scales}")
    _check_scales(stored[scales], scales, outputs, groups)
    if zeros in stored and scheme.is_packed:
        _check(stored[zeros], zeros, ("I32",), (-(-outputs * scheme.num_bits // 32), groups))
    elif zeros in stored:
        _check_scales(stored[zeros], zeros, outputs, groups, types=("I8",))
    _check_order(order, stored, scheme, main, inputs)
    if size in stored:
        _check(stored[size], size, _INDEX_TYPES, (2,))


def _check_scales(
    location: TensorLocation, name: str, outputs: int, groups: int, types: tuple[str, ...] = FLOAT_TYPES
) -> None:
    """Checks scales [outputs, groups]. With a single group there may be one scale for the whole matrix, and the second
    dimension may be missing."""
    shape = location.shape
    if groups == 1 and (math.prod(shape) == 1 or shape == (outputs,)):
        _check(location, name, types, shape)
    else:
        _check(location, name, types, (outputs, groups))


def _check(location: TensorLocation, name: str, types: tuple[str, ...], shape: Shape) -> None:
    if location.dtype not in types:
        raise _unusable(location, name, f"has the type {location.dtype}, expected {' or '.join(types)}")
    if location.shape != shape:
        raise _unusable(location, name, f"has the shape {list(location.shape)}, expected {list(shape)}")


def _unusable(location: TensorLocation, name: str, fault: str) -> StartupError:
    return StartupError(f"{location.path}: {name} {fault}")

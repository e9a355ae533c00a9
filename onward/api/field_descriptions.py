"""Reads the string below each field of a struct from its source code, as the field's description in `/openapi.json`."""

import ast
import inspect
import textwrap

import msgspec


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Returns descriptions by field name, inherited fields included. Raises `OSError` if there is no source code."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= _described_in(base)
    return {name: text for name, text in found.items() if name in struct.__struct_fields__}


def _described_in(struct: type[msgspec.Struct]) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef), "a struct is a class"
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())  # type: ignore[attr-defined]
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

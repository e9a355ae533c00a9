"""The page of the Python API, from the source code of the public classes and functions."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import onward.client
import onward.llm
from onward.version import __version__

from .markdown import NOTE

_MAX_LINE = 88
_MODULES = (
    (onward.client, "onward.client", "Clients that resume their streams. Needs the extra `client`."),
    (onward.llm, "onward", "A model in this process, without a server."),
)
_INTERNAL = ("from_runner",)
"""Methods that tests of Onward itself use."""


def render() -> str:
    parts = ["# Python API\n", NOTE.format(version=__version__) + " [Clients](../client.md) has examples.\n"]
    for module, name, summary in _MODULES:
        parts += [f"## {name}\n", summary + "\n"]
        for public in module.__all__:
            parts += _described(public, getattr(module, public))
    return "\n".join(parts)


def _described(name: str, subject: Any) -> Iterator[str]:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
    yield f"### {name}\n"
    if isinstance(node, ast.ClassDef):
        yield from _class(node)
    else:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "a public name is a class or a function"
        yield _code(_signature(node))
        yield from _docstring(node)


def _class(node: ast.ClassDef) -> Iterator[str]:
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    bases = [ast.unparse(base) for base in node.bases]
    if init is not None and "Exception" not in bases:
        yield _code(_signature(init, name=node.name))
    yield from _docstring(node)
    if init is not None:
        yield from _docstring(init)
        yield from _fields(init.body)
    yield from _fields(node.body)
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            if method.name in _INTERNAL:
                continue
            is_property = any(ast.unparse(one) in ("property", "cached_property") for one in method.decorator_list)
            returned = f": {ast.unparse(method.returns)}" if method.returns else ""
            yield _code(f"{method.name}{returned}" if is_property else _signature(method))
            yield from _docstring(method)


def _fields(body: list[ast.stmt]) -> Iterator[str]:
    """Attributes of a class or of `self`, each with the description below it."""
    for field, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match field:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=default):
                declared = f"{name}: {ast.unparse(kind)}" + (f" = {ast.unparse(default)}" if default else "")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                declared = name
            case _:
                continue
        if not name.startswith("_"):
            text = _text(below)
            yield f"* `{declared}`" + (f": {text[:1].lower()}{text[1:]}" if text else "") + "\n"


def _text(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(ast.literal_eval(node.value).split()) if is_text else ""  # type: ignore[attr-defined]


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield text + "\n"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    parameters = list(_parameters(node.args))
    prefix = ("async def " if isinstance(node, ast.AsyncFunctionDef) else "def ") + node.name if name is None else name
    returned = f" -> {ast.unparse(node.returns)}" if name is None and node.returns is not None else ""
    line = f"{prefix}({', '.join(parameters)}){returned}"
    if len(line) <= _MAX_LINE:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{prefix}(\n{lines}){returned}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Parameters as they are called with, so without `self` and `cls`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield _parameter(argument, default)
    if arguments.vararg is not None:
        yield "*" + _parameter(arguments.vararg, None)
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg is not None:
        yield "**" + _parameter(arguments.kwarg, None)


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    declared = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    return f"{declared} = {ast.unparse(default)}" if default is not None else declared


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"

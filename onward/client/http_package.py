"""The HTTP package that an object belongs to: httpx, or httpx2, which has the same classes and which `openai` 3 uses.

A transport must answer in the classes of its client, and its inner transport raises errors of the same package.
"""

import sys
from typing import Any

_NAMES = ("httpx", "httpx2")


def http_package(value: object) -> Any:
    """Returns the module `httpx` or `httpx2`, whichever has the class of `value` or a base class of it."""
    for base in type(value).__mro__:
        root = base.__module__.partition(".")[0]
        if root in _NAMES:
            return sys.modules[root]
    raise TypeError(f"expected an object of httpx or httpx2, got {type(value).__qualname__}")

"""What a row of the table of sabotages is made of."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sabotage:
    name: str
    breaks: str
    apply: Callable[[], None]
    tests: list[str]


def around(owner: object, name: str, wrapper: Callable) -> None:
    """Puts `wrapper(original, *args)` in the place of a function."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

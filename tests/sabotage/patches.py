"""What a row of the table of sabotages is made of. Knows neither tests nor whoever runs them: a simulator may too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_INHERITED = object()


class Patches:
    """Changes to shipping code, which can be taken back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    @property
    def places(self) -> list[tuple[object, str]]:
        """What is changed: whose, and which name."""
        return [(owner, name) for owner, name, _ in self._before]

    def put(self, owner: object, name: str, value: object) -> None:
        """In the place of what is there: a bug that is put where nobody looks any more must not go unnoticed."""
        assert hasattr(owner, name), f"{owner} has no {name}"
        self.shadow(owner, name, value)

    def shadow(self, owner: object, name: str, value: object) -> None:
        """As a name of the owner's own, in front of an inherited or built-in one."""
        self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def around(self, owner: object, name: str, wrapper: Callable) -> None:
        """Puts `wrapper(original, *args)` in the place of a function."""
        original = getattr(owner, name)
        self.put(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def undo(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True)
class Sabotage:
    name: str
    breaks: str
    apply: Callable[[Patches], None]
    tests: list[str]

    @contextmanager
    def broken(self) -> Iterator[None]:
        """The rule is broken inside, and whole again afterwards."""
        patches = Patches()
        try:
            self.apply(patches)
            yield
        finally:
            patches.undo()

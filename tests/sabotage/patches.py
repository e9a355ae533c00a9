"""A row of the table of sabotages, and the patches that put its bug into shipping code. Knows neither tests nor pytest:
the simulator uses the same rows.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

FAULTS_FILE = "SABOTAGE_FAULTS"
"""The environment variable with the file in which all processes of a run note the faults of the bug itself."""
_INHERITED = object()
_HERE = str(Path(__file__).parent)


@contextmanager
def noting_own_faults() -> Iterator[None]:
    """Notes an exception that the text of a bug raises because the code around it was renamed. A test that fails by it has
    not noticed the bug.
    """
    try:
        yield
    except (AttributeError, NameError, TypeError) as fault:
        innermost = fault.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        path = os.environ.get(FAULTS_FILE)
        if path and innermost is not None and innermost.tb_frame.f_code.co_filename.startswith(_HERE):
            with Path(path).open("a") as file:
                file.write(f"{type(fault).__name__} in line {innermost.tb_lineno} of a bug: {fault}\n")
        raise


class Patches:
    """Changes to shipping code, which can be taken back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    @property
    def places(self) -> list[tuple[object, str]]:
        """What is changed: the owner, and the name."""
        return [(owner, name) for owner, name, _ in self._before]

    def put(self, owner: object, name: str, value: object) -> None:
        """In the place of what is there; an owner without the name is an error, since no code would look there."""
        assert hasattr(owner, name), f"{owner} has no {name}"
        self.shadow(owner, name, value)

    def shadow(self, owner: object, name: str, value: object) -> None:
        """As a name of the owner's own, in front of an inherited or built-in one."""
        self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def around(self, owner: object, name: str, wrapper: Callable) -> None:
        """Puts `wrapper(original, *args)` in the place of a function."""
        assert hasattr(owner, name), f"{owner} has no {name}"
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with noting_own_faults():
                return wrapper(original, *args, **kwargs)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with noting_own_faults():
                return await wrapper(original, *args, **kwargs)

        self.put(owner, name, call_async if iscoroutinefunction(wrapper) else call)

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

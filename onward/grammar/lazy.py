"""Sets up the grammar compiler at its first use, because most processes never need one."""

import threading
from collections.abc import Callable

from onward.grammar.grammar_compiler import GrammarCompiler


class LazyGrammarCompiler:
    """A grammar compiler that the first call of `get` builds, in the calling thread. Threads may share it: calls of
    `get` from other threads wait until it is built."""

    def __init__(self, build: Callable[[], GrammarCompiler]) -> None:
        self._build = build
        self._built: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def get(self) -> GrammarCompiler:
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

"""Grammars that are set up when somebody first needs them: most processes never see one."""

import threading
from collections.abc import Callable

from onward.grammar.grammar_compiler import GrammarCompiler


class LazyGrammarCompiler:
    """Threads may share it. Whoever asks first waits for the set-up, in its own thread."""

    def __init__(self, build: Callable[[], GrammarCompiler]) -> None:
        self._build = build
        self._built: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def get(self) -> GrammarCompiler:
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

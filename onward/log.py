"""One line per event, key=value, to standard error. Numbers go to metrics, and nothing is logged per token.

Values come from clients and peers too (labels, names of instances, error texts). Quotes, line breaks and control characters
are escaped, so that no value can end its field, begin a line or command a terminal.
"""

import logging
import sys

from onward.config import terminal_is_dumb

CONTINUATION_INDENT = "    "
"""In front of every line but the first one of an event, such as those of a traceback. No event begins so."""


ERASE_LINE = "\r\x1b[2K"
"""On a terminal another process may have a progress bar in the line of the cursor. It is drawn again below the event."""


class LineFormatter(logging.Formatter):
    """Escapes what other libraries and exceptions bring, and marks every further line as one. `before` is written in front
    of each event."""

    def __init__(self, format_string: str, before: str = "") -> None:
        super().__init__(format_string)
        self._before = before

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return self._before + ("\n" + CONTINUATION_INDENT).join(map(_printable, lines))


def configure(process: str, level: str = "INFO") -> None:
    """Gives this process's root logger one handler whose lines name the process."""
    handler = logging.StreamHandler(sys.stderr)
    erase = ERASE_LINE if sys.stderr.isatty() and not terminal_is_dumb() else ""
    handler.setFormatter(LineFormatter(f"%(asctime)s {process:<10} %(levelname)-7s %(message)s", erase))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def event(name: str, **fields: object) -> str:
    """`event("worker lost", pid=3, cause="signal 9")` -> `worker lost pid=3 cause="signal 9"`."""
    return " ".join([name, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if " " not in text and '"' not in text and text.isprintable():
        return text
    return '"' + _printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _printable(text: str) -> str:
    """`text` with control characters, line breaks and other invisible characters as Python escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )

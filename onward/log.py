"""One line per event, to standard error: key=value, or one JSON object. Numbers go to metrics, and nothing is logged per
token.

Values come from clients and peers too (labels, names of instances, error texts). Quotes, line breaks and control characters
are escaped, so that no value can end its field, begin a line or control a terminal.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from onward.config import LogFormat, terminal_is_dumb, wants_no_color

CONTINUATION_INDENT = "    "
"""Prefix of all lines of an event but the first, such as the lines of a traceback. No event begins with it."""


ERASE_LINE = "\r\x1b[2K"
"""Written before each event on a terminal, because another process may have a progress bar in the line of the cursor.
That process draws the bar again below the event."""

LEVEL_COLORS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
DIM, RESET = "\x1b[2m", "\x1b[0m"

RESERVED_FIELDS = frozenset({"time", "level", "process", "event", "traceback"})
"""Keys of a JSON line that every event has, or that hold a traceback; a field of that name gets an underscore."""


class LogEvent(str):
    """An event as its key=value line, which also keeps its name and fields for lines of JSON."""

    __slots__ = ("fields", "name")
    name: str
    fields: Mapping[str, object]


class LineFormatter(logging.Formatter):
    """Escapes the texts of other libraries and of exceptions, and indents every line but the first."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return ("\n" + CONTINUATION_INDENT).join(map(_printable, lines))


class TerminalFormatter(logging.Formatter):
    """Formats short lines for people: time of day, process and event. A level other than INFO is shown too, in
    colour."""

    def __init__(self, process: str, *, color: bool) -> None:
        super().__init__("%(message)s")
        self._process, self._color = process, color

    def format(self, record: logging.LogRecord) -> str:
        lines = [_printable(line) for line in super().format(record).splitlines()]
        level = "" if record.levelname == "INFO" else record.levelname
        prefix = [
            self._in_color(f"{self.formatTime(record, '%H:%M:%S')} {self._process:<10}", DIM),
            *([self._in_color(level, LEVEL_COLORS.get(level, ""))] if level else []),
        ]
        return ERASE_LINE + " ".join([*prefix, ("\n" + CONTINUATION_INDENT).join(lines)])

    def _in_color(self, text: str, color: str) -> str:
        return f"{color}{text}{RESET}" if self._color and color else text


class JsonFormatter(logging.Formatter):
    """Formats each event as one JSON object. Numbers, booleans, lists and None keep their types; other values become
    text."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
        }
        event = record.msg
        if isinstance(event, LogEvent):
            line["event"] = event.name
            for key, value in event.fields.items():
                line[f"{key}_" if key in RESERVED_FIELDS else key] = _json_value(value)
        else:
            line["event"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(process: str, level: str = "INFO", format: LogFormat = "text") -> None:
    """Sets up logging of this process. One handler, which writes to stderr in the given format, replaces all handlers
    of the root logger. Each line names the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process, format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It warns of each form that is not valid, which a client may send without end; the client is told anyway.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _formatter(process: str, format: LogFormat) -> logging.Formatter:
    if format == "json":
        return JsonFormatter(process)
    if sys.stderr.isatty() and not terminal_is_dumb():
        return TerminalFormatter(process, color=not wants_no_color())
    return LineFormatter(f"%(asctime)s {process:<10} %(levelname)-7s %(message)s")


def event(name: str, **fields: object) -> LogEvent:
    """Returns a log message with this name and these fields, which JSON logs keep apart. In text logs,
    `event("worker lost", pid=3, cause="signal 9")` is `worker lost pid=3 cause="signal 9"`."""
    line = LogEvent(" ".join([name, *(f"{key}={_quoted(value)}" for key, value in fields.items())]))
    line.name, line.fields = name, fields
    return line


def request_fields(request_id: str, label: str) -> dict[str, str]:
    """Returns the fields of every event about one request: its id, and as `label` the client request id if there is
    one."""
    return {"id": request_id, "label": label} if label else {"id": request_id}


def _json_value(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6) if value - value == 0 else str(value)  # JSON has no infinity and no NaN
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value)


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if " " not in text and '"' not in text and text.isprintable():
        return text
    return '"' + _printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _printable(text: str) -> str:
    """Returns `text` with control characters, line breaks and other invisible characters as Python escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )

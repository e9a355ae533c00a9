"""One line per event, key=value, to standard error. Numbers go to metrics, and nothing is logged per token."""

import logging
import sys


def set_up(process: str, level: str = "INFO") -> None:
    """Gives this process's root logger one handler whose lines name the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {process:<10} %(levelname)-7s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def event(name: str, **fields: object) -> str:
    """`event("worker lost", pid=3, cause="signal 9")` -> `worker lost pid=3 cause="signal 9"`."""
    return " ".join([name, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text

"""While a simulation runs, nobody reads logs; but an error that the code under test has caught and logged is a finding."""

import contextlib
import logging
from collections.abc import Callable, Iterator


class _ErrorHandler(logging.Handler):
    def __init__(self, on_error: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_error = on_error

    def emit(self, record: logging.LogRecord) -> None:
        self._on_error(record.getMessage(), record.exc_info[1] if record.exc_info else None)


@contextlib.contextmanager
def capture_logged_errors(on_error: Callable[[str, BaseException | None], None]) -> Iterator[None]:
    logger = logging.getLogger("onward")
    before = logger.level, logger.propagate
    catcher = _ErrorHandler(on_error)
    logger.addHandler(catcher)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(catcher)
        logger.level, logger.propagate = before
        logger.manager._clear_cache()  # type: ignore[attr-defined]

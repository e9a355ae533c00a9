"""What holds for every test: signals mean what they mean in a terminal."""

import signal


def pytest_configure() -> None:
    # A shell that starts a run in the background has it ignore SIGINT, and so would every process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

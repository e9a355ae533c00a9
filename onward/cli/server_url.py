"""Checks the address of a server as a user gives it, and describes why no server answers there. Opens nothing."""

from urllib.parse import urlsplit

from onward.errors import InvalidRequest


def checked_url(text: str, name: str) -> str:
    """Returns the URL without a slash at its end. Raises `InvalidRequest` with `name`, the flag or the place on the
    command line, if it is malformed."""
    try:
        parts = urlsplit(text)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise InvalidRequest(f"{name} {text!r} is not an address such as http://127.0.0.1:8000", param="url")
    return text.rstrip("/")


def describe_error(fault: BaseException) -> str:
    """Returns a connection error in few words: a refused connection, an unknown host name, an untrusted certificate."""
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__

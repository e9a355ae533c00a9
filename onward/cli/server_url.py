"""The address of a server as a person gives it, and why nobody answers there. Opens nothing."""

from urllib.parse import urlsplit

from onward.errors import InvalidRequest


def checked_url(text: str, name: str) -> str:
    """Without a slash at its end. `name` is the flag, or the place on the command line."""
    try:
        parts = urlsplit(text)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise InvalidRequest(f"{name} {text!r} is no address such as http://127.0.0.1:8000", param="url")
    return text.rstrip("/")


def describe_error(fault: BaseException) -> str:
    """A refused connection, a name that nobody knows, a certificate that is not trusted: in few words."""
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__

"""The certificate and the key of HTTPS: which flags name them, and whether they can be used.

Imports no HTTP server: a supervisor only checks the files.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onward.errors import StartupError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files."""

    cert: str
    key: str


class TlsFlags(Protocol):
    @property
    def tls_cert(self) -> str | None: ...
    @property
    def tls_key(self) -> str | None: ...


def tls_files(config: TlsFlags) -> TlsFiles | None:
    """Returns the files that the flags name, or None. Raises `StartupError` for one without the other."""
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        missing = "--tls-cert" if config.tls_cert is None else "--tls-key"
        raise StartupError(f"--tls-cert and --tls-key belong together; {missing} is missing")
    return TlsFiles(config.tls_cert, config.tls_key)


def check_tls(tls: TlsFiles) -> None:
    """Raises `StartupError` for files that cannot be used, before anything is opened."""
    for flag, path in (("--tls-cert", tls.cert), ("--tls-key", tls.key)):
        try:
            with Path(path).open("rb"):
                pass
        except OSError as fault:
            raise StartupError(f"cannot read {flag} {path}: {fault.strerror}") from None
    try:
        # Without this callback OpenSSL would ask for a passphrase at the terminal, and wait.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as fault:
        reason = getattr(fault, "reason", None) or str(fault)
        raise StartupError(
            f"--tls-cert {tls.cert} and --tls-key {tls.key} are not a certificate and its key: {reason}"
        ) from None


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted with a passphrase; give a key file without one")

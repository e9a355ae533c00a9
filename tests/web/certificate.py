"""A certificate for 127.0.0.1 that only the test trusts."""

import subprocess
from pathlib import Path


def make(folder: Path) -> tuple[str, str]:
    """The files of the certificate and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "1", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(cert), str(key)

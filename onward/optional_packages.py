"""Packages that the default install leaves out: whether they are there, and which extra brings them.

int8 on a CPU needs none of them. Nothing is imported to find out.
"""

from importlib.util import find_spec

from onward.errors import StartupError

OTEL_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def require_torch(feature: str, *, alternative: str | None = None) -> None:
    """Raises `StartupError` if torch, which `feature` (a flag or a model) needs, is not installed."""
    _require(feature, ("torch",), extra="torch", alternative=alternative)


def require_cuda(feature: str) -> None:
    _require(feature, ("torch", "triton"), extra="cuda", alternative=None)


def require_otel(feature: str) -> None:
    _require(feature, OTEL_PACKAGES, extra="otel", alternative=None)


def has_otel() -> bool:
    return all(_is_installed(package) for package in OTEL_PACKAGES)


def _require(feature: str, packages: tuple[str, ...], *, extra: str, alternative: str | None) -> None:
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        # With a folder: no index has this package, and the name may be taken there.
        advice = f"install the extra onward[{extra}] (pip install -e '.[{extra}]' in the source folder)"
        advice += f", or use {alternative}" if alternative else ""
        raise StartupError(f"{feature} needs {' and '.join(missing)}, not installed here: {advice}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False

"""Checks whether optional packages are installed. An error names the extra that installs a missing one.

int8 on a CPU needs none of these packages. The checks do not import them.
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


def require_ray(feature: str) -> None:
    _require(feature, ("ray",), extra="ray", alternative=None)


def require_httpx(feature: str) -> None:
    _require(feature, ("httpx",), extra="client", alternative=None)


def require_openai(feature: str) -> None:
    _require(feature, ("openai",), extra="client", alternative=None)


def has_otel() -> bool:
    return all(_is_installed(package) for package in OTEL_PACKAGES)


def _require(feature: str, packages: tuple[str, ...], *, extra: str, alternative: str | None) -> None:
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        # The advice names a folder: Onward is on no package index, and its name may be taken there.
        advice = f"install the extra onward[{extra}] (pip install -e '.[{extra}]' in the source folder)"
        advice += f", or use {alternative}" if alternative else ""
        raise StartupError(f"{feature} needs {' and '.join(missing)}, not installed here: {advice}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False

"""Packages that the default install leaves out: whether they are there, and which extra brings them.

int8 on a CPU needs none of them. Nothing is imported to find out.
"""

from importlib.util import find_spec

from onward.errors import StartupError


def require_torch(what: str, *, instead: str | None = None) -> None:
    """Raises `StartupError` if `what`, a flag or a model, needs torch and it is not installed."""
    _require(what, ("torch",), extra="torch", instead=instead)


def require_cuda(what: str) -> None:
    _require(what, ("torch", "triton"), extra="cuda", instead=None)


def _require(what: str, packages: tuple[str, ...], *, extra: str, instead: str | None) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        # With a folder: no index has this package, and the name may be taken there.
        advice = f"install the extra onward[{extra}] (pip install -e '.[{extra}]' in the source folder)"
        advice += f", or use {instead}" if instead else ""
        raise StartupError(f"{what} needs {' and '.join(missing)}, not installed here: {advice}")

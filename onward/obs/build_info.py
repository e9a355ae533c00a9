"""The running version as a metric, which dashboards join with others to show a rollout."""

import platform

from onward.obs.metrics import Registry
from onward.version import __version__


def register_build_info(registry: Registry) -> None:
    labels = (__version__, platform.python_version())
    registry.gauge(
        "onward_build_info", "Always 1; its labels say which version runs.", ["version", "python"], lambda: {labels: 1}
    )

"""Reads Prometheus' text form: values by name and labels, without the labels that every series of an instance has."""

import re

_CONSTANT = re.compile(r'(?<=[{,])(?:model_name="[^"]*"|role="(?:mixed|prefill|decode)")(?:,|(?=}))')


def parse_metrics(text: str) -> dict[str, float]:
    """`{'onward_requests{state="running"}': 1.0}`."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {_own_labels(key): float(value) for key, value in pairs}


def _own_labels(key: str) -> str:
    return _CONSTANT.sub("", key).replace(",}", "}").replace("{}", "")

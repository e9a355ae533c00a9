"""The names and labels of metrics in `/metrics`: labels of the instance, earlier names, vLLM's names.

All this happens when `/metrics` is read, so a further name costs nothing while requests run.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from onward.config import MetricsNames
from onward.obs.metrics import merge
from onward.proto.stats import MetricFamily, MetricSeries

DEPRECATED_NAMES = {
    "onward_ttft_seconds": "onward_request_prefill_time_seconds",
    "onward_queue_seconds": "onward_request_queue_time_seconds",
    "onward_inter_token_seconds": "onward_inter_token_latency_seconds",
    "onward_pd_handovers": "onward_pd_handoffs",
    "onward_pd_handovers_total": "onward_pd_handoffs_total",
    "onward_pd_handover_seconds": "onward_pd_handoff_seconds",
    "onward_shelf_records": "onward_stream_store_records",
    "onward_shelf_bytes": "onward_stream_store_bytes",
    "onward_shelf_evicted_total": "onward_stream_store_evicted_total",
    "onward_shelf_lost_total": "onward_stream_store_lost_total",
}
"""Maps earlier names to current ones. Earlier names are shown for one release, and then removed."""

VLLM_ENGINE = {"engine": "0"}
"""vLLM numbers its engines; an instance has one."""

_RUNNING = ("running", "preempting")
_WAITING = ("waiting", "asked", "granted", "offered")
_VLLM_FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class MetricsRelabeling:
    """Renames and labels applied to all metrics on export: aliases (deprecated, vLLM) and constant `labels`."""

    names: MetricsNames = "onward"
    labels: Mapping[str, str] = field(default_factory=dict)

    def apply(self, families: Iterable[MetricFamily]) -> list[MetricFamily]:
        shown = list(families)
        renamed = [*deprecated_names(shown), *(vllm_names(shown) if self.names == "vllm" else [])]
        return with_labels([*shown, *renamed], self.labels)


def with_labels(families: Iterable[MetricFamily], labels: Mapping[str, str]) -> list[MetricFamily]:
    """Adds labels to all series. A label that a series already has keeps its value."""
    return [
        msgspec.structs.replace(
            family,
            series=[msgspec.structs.replace(entry, labels={**labels, **entry.labels}) for entry in family.series],
        )
        for family in families
    ]


def deprecated_names(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    by_name = {family.name: family for family in families}
    return [
        msgspec.structs.replace(by_name[name], name=earlier, help=f"Deprecated: the same as {name}.")
        for earlier, name in DEPRECATED_NAMES.items()
        if name in by_name
    ]


Convert = Callable[[MetricFamily], MetricFamily]


def _same(name: str) -> tuple[str, Convert]:
    return name, lambda family: family


def _selected(name: str, label: str, values: tuple[str, ...], shown_as: str = "") -> tuple[str, Convert]:
    """Adds up the series with these values of a label. With `shown_as`, each value keeps its own series, under that
    label."""

    def convert(family: MetricFamily) -> MetricFamily:
        chosen = [
            msgspec.structs.replace(entry, labels={shown_as: entry.labels[label]} if shown_as else {})
            for entry in family.series
            if entry.labels[label] in values
        ]
        return merge([[msgspec.structs.replace(family, series=chosen)]])[0]

    return name, convert


def _summed(name: str) -> tuple[str, Convert]:
    """Adds up all series and drops their labels."""

    def convert(family: MetricFamily) -> MetricFamily:
        series = [msgspec.structs.replace(entry, labels={}) for entry in family.series]
        return merge([[msgspec.structs.replace(family, series=series)]])[0]

    return name, convert


def _by_position(name: str) -> tuple[str, Convert]:
    """Converts the places of drafts, which count from 1, to vLLM's positions, which count from 0."""

    def convert(family: MetricFamily) -> MetricFamily:
        series = [
            msgspec.structs.replace(entry, labels={"position": str(int(entry.labels["place"]) - 1)})
            for entry in family.series
        ]
        return msgspec.structs.replace(family, series=series)

    return name, convert


def _cache_config(name: str) -> tuple[str, Convert]:
    """Converts the labels to the ones that the Gateway API inference extension reads."""

    def convert(family: MetricFamily) -> MetricFamily:
        series = [
            MetricSeries(
                {
                    "block_size": entry.labels["block_size"],
                    "num_gpu_blocks": entry.labels["num_kv_blocks"],
                    "enable_prefix_caching": entry.labels["prefix_caching"].capitalize(),
                },
                entry.value,
            )
            for entry in family.series
        ]
        return msgspec.structs.replace(family, series=series)

    return name, convert


VLLM_NAMES: tuple[tuple[str, tuple[str, Convert]], ...] = (
    ("vllm:num_requests_running", _selected("onward_requests", "state", _RUNNING)),
    ("vllm:num_requests_waiting", _selected("onward_requests", "state", _WAITING)),
    ("vllm:kv_cache_usage_perc", _same("onward_kv_cache_usage_ratio")),
    ("vllm:gpu_cache_usage_perc", _same("onward_kv_cache_usage_ratio")),
    ("vllm:prefix_cache_queries_total", _selected("onward_tokens_total", "kind", ("prompt",))),
    ("vllm:prefix_cache_hits_total", _selected("onward_tokens_total", "kind", ("cached",))),
    ("vllm:gpu_prefix_cache_queries_total", _selected("onward_tokens_total", "kind", ("prompt",))),
    ("vllm:gpu_prefix_cache_hits_total", _selected("onward_tokens_total", "kind", ("cached",))),
    ("vllm:num_preemptions_total", _same("onward_preemptions_total")),
    ("vllm:prompt_tokens_total", _selected("onward_tokens_total", "kind", ("prompt",))),
    ("vllm:generation_tokens_total", _selected("onward_tokens_total", "kind", ("generated",))),
    (
        "vllm:request_success_total",
        _selected("onward_requests_finished_total", "reason", _VLLM_FINISH_REASONS, "finished_reason"),
    ),
    ("vllm:time_to_first_token_seconds", _same("onward_time_to_first_token_seconds")),
    ("vllm:inter_token_latency_seconds", _same("onward_inter_token_latency_seconds")),
    ("vllm:time_per_output_token_seconds", _same("onward_inter_token_latency_seconds")),
    ("vllm:request_time_per_output_token_seconds", _same("onward_request_time_per_output_token_seconds")),
    ("vllm:e2e_request_latency_seconds", _summed("onward_e2e_request_latency_seconds")),
    ("vllm:request_queue_time_seconds", _same("onward_request_queue_time_seconds")),
    ("vllm:request_prefill_time_seconds", _same("onward_request_prefill_time_seconds")),
    ("vllm:request_decode_time_seconds", _same("onward_request_decode_time_seconds")),
    ("vllm:request_inference_time_seconds", _same("onward_request_inference_time_seconds")),
    ("vllm:request_prompt_tokens", _same("onward_request_prompt_tokens")),
    ("vllm:request_generation_tokens", _same("onward_request_generation_tokens")),
    ("vllm:request_max_num_generation_tokens", _same("onward_request_generation_tokens")),
    ("vllm:request_params_max_tokens", _same("onward_request_max_tokens")),
    ("vllm:iteration_tokens_total", _same("onward_step_tokens")),
    ("vllm:cache_config_info", _cache_config("onward_cache_config_info")),
    ("vllm:spec_decode_num_drafts_total", _same("onward_spec_verifications_total")),
    ("vllm:spec_decode_num_draft_tokens_total", _summed("onward_spec_drafted_tokens_total")),
    ("vllm:spec_decode_num_accepted_tokens_total", _summed("onward_spec_accepted_tokens_total")),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", _by_position("onward_spec_accepted_tokens_total")),
)
"""vLLM's name, our name, and the conversion from ours to vLLM's. Two of vLLM's names may mean the same, an earlier and
a later one."""


def vllm_names(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Returns the metrics under the names that vLLM's dashboards, autoscalers and the Gateway API inference extension
    read. A metric without a series here, for example before the first request has ended, is left out."""
    by_name = {family.name: family for family in families}
    shown = list[MetricFamily]()
    for vllm_name, (name, convert) in VLLM_NAMES:
        if name in by_name and (family := convert(by_name[name])).series:
            shown.append(msgspec.structs.replace(family, name=vllm_name))
    return with_labels(shown, VLLM_ENGINE)

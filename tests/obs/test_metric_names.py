"""Labels of an instance, earlier names and vLLM's names are made from the same numbers."""

from onward.obs.metric_names import DEPRECATED_NAMES, VLLM_NAMES, MetricsRelabeling, deprecated_names, vllm_names
from onward.obs.metrics import Registry
from onward.obs.prometheus_text import render
from onward.proto.stats import MetricFamily

LABELS = {"model_name": "m", "role": "decode"}


def families() -> list[MetricFamily]:
    registry = Registry()
    states = {"waiting": 3, "asked": 1, "granted": 1, "offered": 2, "running": 4, "preempting": 1}
    registry.gauge("onward_requests", "R.", ["state"], lambda: {(state,): n for state, n in states.items()})
    finished = registry.counter("onward_requests_finished_total", "F.", ["reason"])
    for reason in ("stop", "length", "handed_over"):
        finished.inc(reason)
    tokens = registry.counter("onward_tokens_total", "T.", ["kind"])
    for kind, amount in (("prompt", 50), ("cached", 20), ("generated", 7)):
        tokens.inc(kind, by=amount)
    registry.histogram("onward_inter_token_latency_seconds", "I.", [0.1]).observe(0.05)
    latency = registry.labelled_histogram("onward_e2e_request_latency_seconds", "E.", ["finish_reason"], [1.0])
    latency.observe(0.5, "stop")
    latency.observe(2.0, "length")
    registry.counter("onward_spec_accepted_tokens_total", "A.", ["place"]).inc("1", by=3)
    info = ("16", "64", "true")
    registry.gauge(
        "onward_cache_config_info", "C.", ["block_size", "num_kv_blocks", "prefix_caching"], lambda: {info: 1}
    )
    return registry.snapshot()


def shown(view: MetricsRelabeling) -> list[str]:
    return render(view.apply(families())).decode().splitlines()


def test_every_series_has_the_labels_of_its_instance() -> None:
    lines = [line for line in shown(MetricsRelabeling("vllm", LABELS)) if not line.startswith("#")]
    assert len(lines) > 20
    assert all('model_name="m"' in line and 'role="decode"' in line for line in lines)


def test_a_series_keeps_its_own_label_of_the_same_name() -> None:
    registry = Registry()
    registry.gauge("onward_router_instances", "I.", ["role"], lambda: {("prefill",): 1})
    text = render(MetricsRelabeling("onward", LABELS).apply(registry.snapshot())).decode()
    assert 'onward_router_instances{model_name="m",role="prefill"} 1.0' in text


def test_earlier_names_show_the_same_numbers_and_say_which_name_is_better() -> None:
    [old] = deprecated_names(families())
    assert (old.name, old.help) == (
        "onward_inter_token_seconds",
        "Deprecated: the same as onward_inter_token_latency_seconds.",
    )
    [new] = [family for family in families() if family.name == DEPRECATED_NAMES[old.name]]
    assert (old.series, old.bounds) == (new.series, new.bounds)
    assert not set(DEPRECATED_NAMES) & set(DEPRECATED_NAMES.values())


def test_earlier_names_are_shown_beside_today_s() -> None:
    lines = shown(MetricsRelabeling("onward", {}))
    for name in ("onward_inter_token_seconds", "onward_inter_token_latency_seconds"):
        assert f"{name}_count 1.0" in lines


def test_vllm_s_names_are_shown_only_where_they_are_asked_for() -> None:
    assert not [line for line in shown(MetricsRelabeling("onward", LABELS)) if "vllm" in line]
    lines = shown(MetricsRelabeling("vllm", {"model_name": "m"}))
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 5.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 7.0',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 50.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 50.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 20.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 7.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0",model_name="m"} 1.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 3.0',
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",model_name="m",'
        'num_gpu_blocks="64"} 1.0',
    ):
        assert line in lines, line
    assert not [line for line in lines if "handed_over" in line and line.startswith("vllm")]


def test_a_metric_that_has_no_series_yet_is_left_out() -> None:
    registry = Registry()
    registry.counter("onward_requests_finished_total", "F.", ["reason"])
    assert vllm_names(registry.snapshot()) == []


def test_vllm_s_names_are_unique() -> None:
    names = [name for name, _ in VLLM_NAMES]
    assert len(set(names)) == len(names) and all(name.startswith("vllm:") for name in names)

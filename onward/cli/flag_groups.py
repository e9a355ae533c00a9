"""In which order `--help` shows the flags of a server: first those that most people need, then the others by topic."""

from collections.abc import Mapping

Groups = Mapping[str, tuple[str, ...]]

SERVE: Groups = {
    "the flags that most people need": (
        "model",
        "served_model_name",
        "host",
        "port",
        "device",
        "quantization",
        "max_model_len",
        "max_num_seqs",
        "threads",
        "api_key_file",
    ),
    "model": (
        "dtype",
        "deterministic",
        "load_format",
        "generation_config",
        "speculative",
        "tool_call_parser",
        "reasoning_parser",
        "pooling",
    ),
    "memory and scheduling": (
        "gpu_memory_utilization",
        "block_size",
        "num_kv_blocks",
        "max_num_batched_tokens",
        "max_queue",
        "max_queue_tokens",
        "output_caching",
        "transport",
    ),
    "keys and TLS": ("api_key", "api_keys", "insecure", "open_metrics", "tls_cert", "tls_key", "cors_origin"),
    "requests and connections": (
        "default_max_tokens",
        "strict_fields",
        "trust_request_chat_template",
        "internal_adapter",
        "detach_ttl_s",
        "response_ttl_s",
        "api_processes",
        "max_body_bytes",
        "max_connections",
    ),
    "behind a router": ("router", "advertise_url", "cluster_key_file"),
    "prefill and decode on separate instances": (
        "role",
        "handoff_port",
        "prefill_peers",
        "local_prefill",
        "local_prefill_tokens",
        "kv_backend",
        "kv_checksums",
        "kv_port",
        "lease_s",
        "offer_hold_s",
        "handover_timeout_s",
    ),
    "stopping, logs and recordings": (
        "drain_s",
        "stall_timeout_s",
        "log_level",
        "log_interval_s",
        "step_log",
        "record",
        "record_tokens",
    ),
}
ROUTER: Groups = {
    "the flags that most people need": (
        "host",
        "port",
        "instances",
        "policy",
        "api_key_file",
        "cluster_key_file",
        "drain_s",
        "log_level",
    ),
    "routing": ("prefill_policy", "decode_policy", "max_queue", "request_timeout_s"),
    "resuming streams": (
        "preempt_retry_count",
        "preempt_retry_exclude_decode",
        "retry_budget",
        "stall_timeout_s",
        "restart_grace_s",
        "detach_ttl_s",
        "tell_resumes",
    ),
    "keys and TLS": ("api_key", "api_keys", "insecure", "open_metrics", "tls_cert", "tls_key", "cors_origin"),
    "requests and connections": ("default_max_tokens", "strict_fields", "max_body_bytes", "max_connections"),
}
OTHERS = "other flags"
"""For knobs that are in no group: none is left out of the help."""

"""Every setting, declared once with its help text; flags are generated from here. The environment is read only here.

There is one frozen dataclass per process. `ServeConfig` and `RouterConfig` hold command-line flags; `EngineConfig`,
`WorkerConfig` and `ApiConfig` are derived from `ServeConfig` and have the same defaults.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from onward.errors import StartupError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "int8", "fp8", "none"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "none"]
Pooling = Literal["mean", "last"]
"""Which rows of the last layer make one vector: all of them, or the last token's."""
Transport = Literal["shm", "zmq"]
Role = Literal["mixed", "prefill", "decode"]
KvBackend = Literal["auto", "shm", "tcp", "nixl"]
StandbyWorker = Literal["auto", "on", "off"]
KvChecksums = Literal["auto", "on", "off"]
ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31", "json"
]
ReasoningParser = Literal["auto", "none", "think", "qwen3", "deepseek_r1", "mistral"]
MetricsNames = Literal["onward", "vllm"]
LogFormat = Literal["text", "json"]
SimdLevel = Literal["native", "avx2", "plain"]
"""Vector instructions that the CPU kernels are compiled for; see `kernels.cpu.target`."""

DEFAULT_MODEL = "smollm2-135m-instruct"
API_KEY_VARIABLE = "ONWARD_API_KEY"
SIMD_VARIABLE = "ONWARD_SIMD"
BLOCK_MULTIPLE = 16
"""`--block-size` must be a multiple of this."""


def flag_field(
    default: Any, help: str, *, on_cuda: Any = None, alias: str | None = None, nargs: str | None = None
) -> Any:
    """Declares a field that becomes a command-line flag. `on_cuda` is its default on a CUDA device, if it differs.
    `alias` is an earlier name of the flag that is still accepted. `nargs` is argparse's, for a flag with several
    values."""
    metadata = {"help": help, "on_cuda": on_cuda, "alias": alias, "nargs": nargs}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class HttpServerConfig:
    """Settings that `onward serve` and `onward router` share: listening, access, logs and traces."""

    host: str = flag_field("127.0.0.1", "address to listen on")
    drain_s: float = flag_field(5.0, "time that running streams have to finish after SIGTERM")
    detach_ttl_s: float = flag_field(60.0, "how long a stream can be resumed after its client has disconnected")
    api_key: tuple[str, ...] = flag_field(
        (),
        "an admin's API key, which clients send as a bearer token; other users of the machine can read a command line, so "
        "prefer --api-key-file (may be given several times)",
    )
    api_key_file: str | None = flag_field(
        None, "file whose first line is an admin's API key (default: the variable ONWARD_API_KEY, if set)"
    )
    api_keys: str | None = flag_field(None, "file of API keys with names, roles and limits; `onward keys` edits it")
    insecure: bool = flag_field(False, "allow other machines to connect although there are no API keys")
    open_metrics: bool = flag_field(False, "serve /metrics without an API key")
    demo: bool = flag_field(
        False,
        "show buttons in /ui that kill processes, to demonstrate that streams survive; only on loopback and with an "
        "admin's key",
    )
    tls_cert: str | None = flag_field(None, "certificate chain (PEM) to serve HTTPS; requires --tls-key")
    tls_key: str | None = flag_field(None, "private key (PEM) of --tls-cert")
    cluster_key_file: str | None = flag_field(
        None,
        "file with the cluster's secret, made by `onward keygen`; required on several machines, and for routers and "
        "instances with API keys",
    )
    cors_origin: tuple[str, ...] = flag_field(
        (), "web origin from which browsers may call (may be given several times)"
    )
    allowed_host: tuple[str, ...] = flag_field(
        (),
        "additional host name under which clients may call a server without API keys; * for any (may be given several "
        "times)",
    )
    default_max_tokens: int = flag_field(
        16, "max_tokens of requests to /v1/completions and /v1/generate that do not set it (0: as many as fit)"
    )
    strict_fields: bool = flag_field(
        False, "refuse requests with unknown fields, instead of naming the fields in a response header"
    )
    max_body_bytes: int = flag_field(8 << 20, "size limit of request bodies")
    max_connections: int = flag_field(4096, "connections with a request in progress, per process; more get a 503")
    batch_dir: str | None = flag_field(
        None, "folder for the files and results of /v1/files and /v1/batches (default: these routes are off)"
    )
    batch_max_bytes: int = flag_field(1 << 30, "bytes that the files of one caller in --batch-dir may have")
    batch_concurrency: int = flag_field(8, "requests of one caller's batches that run at the same time")
    batch_ttl_s: float = flag_field(2_592_000.0, "how long files and ended batches are kept in --batch-dir")
    log_level: str = flag_field("info", "debug, info, warning or error")
    log_format: LogFormat = flag_field("text", "text: key=value lines; json: one JSON object per line")
    otlp_endpoint: str | None = flag_field(
        None,
        "URL of the OpenTelemetry collector to which traces are sent, over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    trace_sample_ratio: float | None = flag_field(
        None, "share of requests to trace, unless the client decides (default: OTEL_TRACES_SAMPLER, or 1)"
    )
    trace_url: str | None = flag_field(
        None, "address of a trace viewer, with {trace_id}, to which the live view of /ui links"
    )


@dataclass(frozen=True, slots=True)
class ServeConfig(HttpServerConfig):
    """Settings of `onward serve`."""

    model: str = flag_field(DEFAULT_MODEL, "Hugging Face id, folder or .gguf file")
    revision: str | None = flag_field(None, "branch, tag or commit of a Hugging Face id (default: main)")
    chat_template: str | None = flag_field(None, "file with a Jinja chat template, used instead of the model's own")
    served_model_name: tuple[str, ...] = flag_field(
        (), "model names that clients may use; answers contain the first (default: derived from --model)", nargs="+"
    )
    model_alias: tuple[str, ...] = flag_field(
        (), "further model name that clients may use (may be given several times)"
    )
    port: int = flag_field(8000, "port to listen on (0: any free one)")
    adopt: bool = flag_field(
        False,
        "replace the server on this port without refusing connections, and take over its KV cache if the formats match",
    )
    device: Device = flag_field("cpu", "device on which the model runs")
    gpu_memory_utilization: float = flag_field(0.9, "share of the CUDA device's memory to use in total")
    deterministic: bool = flag_field(
        False,
        "on CUDA with bfloat16: compute each token independently of its batch, so that resumed streams are bit-exact",
        on_cuda=True,
    )
    dtype: Dtype = flag_field("auto", "type of weights that are not quantized; auto: float32, on CUDA bfloat16")
    quantization: Quantization = flag_field(
        "auto", "int8 (CPU only), fp8 (CUDA only) or none; auto: int8 on the CPU for quantized checkpoints, else none"
    )
    load_format: LoadFormat = flag_field("auto", "dummy: random weights, for benchmarks")
    generation_config: GenerationConfig = flag_field(
        "auto",
        "sampling defaults of requests; auto: from the checkpoint's generation_config.json; none: Onward's own",
    )
    max_model_len: int | None = flag_field(
        None, "maximum length of prompt plus output, in tokens (default: the model's)"
    )
    block_size: int = flag_field(16, "tokens per KV block")
    num_kv_blocks: int | None = flag_field(None, "number of KV blocks (default: as many as free memory allows)")
    max_num_seqs: int = flag_field(64, "maximum number of requests that run at the same time", on_cuda=256)
    max_num_batched_tokens: int = flag_field(
        192, "maximum number of tokens per step; larger steps delay the next tokens of running streams", on_cuda=8192
    )
    speculative: str | None = flag_field(
        None,
        "speculative decoding, with the maximum number of draft tokens: ngram:4, draft:PATH:4 or eagle:PATH:1 (default: "
        "off)",
    )
    standby_worker: StandbyWorker = flag_field(
        "auto",
        "keep a second worker ready that takes over when the first one dies; auto: if there is memory for it",
    )
    prefix_caching: bool = flag_field(True, "reuse the KV blocks of prompts with the same prefix")
    output_caching: bool = flag_field(True, "also cache the KV blocks of outputs")
    internal_adapter: bool = flag_field(
        False, "omit the end token from the token ids of /v1/generate and return_token_ids"
    )
    tool_call_parser: ToolCallParser = flag_field(
        "auto", "format of the model's tool calls; auto: detected from its chat template"
    )
    reasoning_parser: ReasoningParser = flag_field(
        "auto", "tags of the model's reasoning; auto: detected from its chat template"
    )
    max_queue: int = flag_field(1024, "maximum number of waiting requests; more get a 429")
    max_queue_tokens: int = flag_field(262_144, "maximum number of prompt tokens of waiting requests; more get a 429")
    transport: Transport = flag_field("shm", "how engine and worker exchange messages")
    role: Role = flag_field(
        "mixed",
        "prefill: compute prompts for decode instances; decode: generate, with prompts computed by prefill instances; "
        "mixed: both",
    )
    handoff_port: int | None = flag_field(
        None,
        "port for requests of decode instances (0: any free one; default: 0 with --role prefill, else none)",
    )
    prefill_peers: str = flag_field("", "handoff addresses of prefill instances, tcp://HOST:PORT, separated by commas")
    local_prefill: bool = flag_field(True, "let a decode instance compute prompts itself if no peer does")
    local_prefill_tokens: int = flag_field(
        16, "a decode instance computes prompts with at most this many uncached tokens itself"
    )
    kv_backend: KvBackend = flag_field(
        "auto", "how KV is transferred to a decode instance; auto: shm if all peers are on this machine, else tcp"
    )
    kv_checksums: KvChecksums = flag_field("auto", "verify each KV block after a transfer; auto: on over tcp")
    kv_port: int = flag_field(0, "port to which prefill instances send KV over tcp and nixl (0: any free one)")
    lease_s: float = flag_field(5.0, "how long a silent peer keeps the blocks that it was granted")
    offer_hold_s: float = flag_field(0.5, "how long a peer's offer may wait for free blocks before it is refused")
    handoff_timeout_s: float = flag_field(
        60.0, "how long one peer may take for one prompt, including its queue", alias="--handover-timeout-s"
    )
    router: str = flag_field("", "URLs of routers to register with, separated by commas")
    instance_name: str = flag_field(
        "instance", "prefix of this instance's id, as shown by `onward status`, /info and routers' logs"
    )
    instance_generation: int = flag_field(
        0, "routers keep only the highest generation of an --instance-name (0: several instances may share a name)"
    )
    node_name: str = flag_field("", "machine that `onward status` shows for this instance")
    advertise_url: str | None = flag_field(None, "URL at which routers reach this instance (default: http://HOST:PORT)")
    response_ttl_s: float = flag_field(3600.0, "how long a stored response can be retrieved")
    threads: int | None = flag_field(
        None, "threads of the worker, or of each of its ranks (default: the number of cores, divided among the ranks)"
    )
    tensor_parallel: int = flag_field(1, "number of processes (ranks) that compute each step together")
    api_processes: int = flag_field(1, "number of processes that serve HTTP")
    metrics_names: MetricsNames = flag_field("onward", "vllm: also export metrics under the names of vLLM")
    pooling: Pooling = flag_field(
        "mean", "how the token vectors of a text are combined (embeddings, scores), unless the request sets it"
    )
    trust_request_chat_template: bool = flag_field(
        False, "allow a chat_template in requests; it is rendered in a sandboxed process"
    )
    tokenizer_info: bool = flag_field(False, "show special tokens and the chat template at /tokenizer_info")
    stall_timeout_s: float = flag_field(120.0, "kill a worker that has work and completes no step for this long")
    stopped_timeout_s: float = flag_field(5.0, "replace a process that was stopped by a signal (SIGSTOP) for this long")
    log_interval_s: float = flag_field(5.0, "interval of the scheduler's log line; none while idle (0: never)")
    step_log: str | None = flag_field(None, "file to which one JSON line per step is written")
    record: str | None = flag_field(None, "file to which all messages of the engine are recorded, for `onward replay`")
    record_tokens: bool = flag_field(False, "record the real token ids instead of anonymized ones")


RoutingPolicy = Literal["round_robin", "random", "least_loaded", "power_of_two", "prefix", "session"]


@dataclass(frozen=True, slots=True)
class RouterConfig(HttpServerConfig):
    """Settings of `onward router`."""

    port: int = flag_field(8080, "port to listen on (0: any free one)")
    instances: str = flag_field("", "URLs of instances that do not register by themselves, separated by commas")
    policy: RoutingPolicy = flag_field("least_loaded", "how the instance for a request is chosen")
    prefill_policy: RoutingPolicy | None = flag_field(None, "how a prefill instance is chosen (default: --policy)")
    decode_policy: RoutingPolicy | None = flag_field(None, "how a decode instance is chosen (default: --policy)")
    preempt_retry_count: int = flag_field(3, "retries of a stream after its last delivered token")
    preempt_retry_exclude_decode: bool = flag_field(
        False, "do not retry at the decode instance that failed last, if there is another"
    )
    retry_budget: float = flag_field(
        0.2, "retries without progress, as a share of the caller's requests of the last minute"
    )
    stall_timeout_s: float = flag_field(15.0, "move a stream that makes no progress for this long to another instance")
    restart_grace_s: float = flag_field(
        5.0, "how long an instance may take to restart a process before its streams move"
    )
    max_queue: int = flag_field(1024, "maximum number of requests that wait for an instance; more get a 429")
    request_timeout_s: float | None = flag_field(None, "deadline of requests without deadline_ms")
    route: tuple[str, ...] = flag_field(
        (),
        "NAME=MODEL:SHARE,MODEL:SHARE: requests for NAME go to these models, by shares that add up to 1; "
        "NAME=MODEL is an alias (may be given several times)",
    )
    report_resumes: bool = flag_field(
        False, "end each stream with a comment that contains the number of its resumes", alias="--tell-resumes"
    )


def serve_default(name: str) -> Any:
    """Declares a field with the default of the `ServeConfig` field of this name."""
    declared = ServeConfig.__dataclass_fields__[name]
    return field(default=declared.default, default_factory=declared.default_factory)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_num_seqs: int = serve_default("max_num_seqs")
    max_num_batched_tokens: int = serve_default("max_num_batched_tokens")
    max_queue: int = serve_default("max_queue")
    max_queue_tokens: int = serve_default("max_queue_tokens")
    max_steps_in_flight: int = 2
    num_draft_tokens: int = 0
    """Tokens that a request may draft in a step, at most. 0: none."""
    prefix_caching: bool = serve_default("prefix_caching")
    output_caching: bool = serve_default("output_caching")
    tombstone_s: float = 30.0
    role: Role = serve_default("role")
    prefill_peers: tuple[str, ...] = ()
    local_prefill: bool = serve_default("local_prefill")
    local_prefill_tokens: int = serve_default("local_prefill_tokens")
    kv_checksums: bool = False
    lease_s: float = serve_default("lease_s")
    offer_hold_s: float = serve_default("offer_hold_s")
    handoff_timeout_s: float = serve_default("handoff_timeout_s")
    log_interval_s: float = serve_default("log_interval_s")
    step_log: str | None = serve_default("step_log")
    record: str | None = serve_default("record")
    record_tokens: bool = serve_default("record_tokens")
    log_level: str = serve_default("log_level")
    log_format: LogFormat = serve_default("log_format")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    max_num_seqs: int = serve_default("max_num_seqs")
    max_num_batched_tokens: int = serve_default("max_num_batched_tokens")
    block_size: int = serve_default("block_size")
    num_kv_blocks: int | None = serve_default("num_kv_blocks")
    keeps_pool_size: bool = False
    """Whether `num_kv_blocks` was chosen by an earlier worker. False: it comes from `--num-kv-blocks`."""
    max_model_len: int | None = serve_default("max_model_len")
    threads: int | None = serve_default("threads")
    tensor_parallel: int = serve_default("tensor_parallel")
    device: Device = serve_default("device")
    gpu_memory_utilization: float = serve_default("gpu_memory_utilization")
    deterministic: bool = serve_default("deterministic")
    kv_backend: KvBackend | None = None
    """How peers write KV into this worker; never `auto`. None: no peer does."""
    kv_host: str = "127.0.0.1"
    """Host under which peers reach this worker, for backends that need a network."""
    kv_port: int = serve_default("kv_port")
    speculative: str | None = serve_default("speculative")
    """How draft tokens are proposed, in the form that `proto.speculative_config` parses. None: drafting is off."""
    standby_worker: StandbyWorker = serve_default("standby_worker")
    """Whether the KV pool on a CUDA device leaves room for a standby worker."""
    log_level: str = serve_default("log_level")
    log_format: LogFormat = serve_default("log_format")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    host: str = serve_default("host")
    cors_origin: tuple[str, ...] = serve_default("cors_origin")
    allowed_host: tuple[str, ...] = serve_default("allowed_host")
    max_body_bytes: int = serve_default("max_body_bytes")
    max_connections: int = serve_default("max_connections")
    batch_dir: str | None = serve_default("batch_dir")
    batch_max_bytes: int = serve_default("batch_max_bytes")
    batch_concurrency: int = serve_default("batch_concurrency")
    batch_ttl_s: float = serve_default("batch_ttl_s")
    max_choices: int = 16
    default_max_tokens: int = serve_default("default_max_tokens")
    strict_fields: bool = serve_default("strict_fields")
    trust_request_chat_template: bool = serve_default("trust_request_chat_template")
    tokenizer_info: bool = serve_default("tokenizer_info")
    pooling: Pooling = serve_default("pooling")
    default_deadline_s: float | None = None
    internal_adapter: bool = serve_default("internal_adapter")
    tool_call_parser: ToolCallParser = serve_default("tool_call_parser")
    reasoning_parser: ReasoningParser = serve_default("reasoning_parser")
    role: Role = serve_default("role")
    routers: tuple[str, ...] = ()
    url: str = ""
    """URL under which routers reach this instance."""
    instance_name: str = serve_default("instance_name")
    instance_generation: int = serve_default("instance_generation")
    node_name: str = serve_default("node_name")
    handoff_address: str = ""
    cluster_key: str = ""
    detach_ttl_s: float = serve_default("detach_ttl_s")
    response_ttl_s: float = serve_default("response_ttl_s")
    open_metrics: bool = serve_default("open_metrics")
    metrics_names: MetricsNames = serve_default("metrics_names")
    demo: bool = serve_default("demo")
    tls_cert: str | None = serve_default("tls_cert")
    tls_key: str | None = serve_default("tls_key")
    log_level: str = serve_default("log_level")
    log_format: LogFormat = serve_default("log_format")
    otlp_endpoint: str | None = serve_default("otlp_endpoint")
    trace_sample_ratio: float | None = serve_default("trace_sample_ratio")
    trace_url: str | None = serve_default("trace_url")
    serve_config: dict[str, Any] = field(default_factory=dict)
    """The instance's `ServeConfig`, as `/info` shows it."""


def derive_config(source: Any, target: type[Any], **overrides: Any) -> Any:
    """Builds a process's config from the fields that it shares with `source`, and from `overrides`."""
    shared = {f.name for f in dataclasses.fields(target)} & {f.name for f in dataclasses.fields(source)}
    return target(**({name: getattr(source, name) for name in shared} | overrides))


def with_defaults(config: type[Any], given: dict[str, Any]) -> Any:
    """Returns the config with the given values. Other fields have their defaults, on a CUDA device those for CUDA."""
    is_cuda = given.get("device") == "cuda"
    device_defaults = {
        f.name: f.metadata["on_cuda"] for f in dataclasses.fields(config) if is_cuda and f.metadata.get("on_cuda")
    }
    if given.get("quantization") == "fp8" or given.get("dtype") in ("float32", "float16"):
        device_defaults.pop("deterministic", None)  # only bfloat16 was shown to be exact
    return config(**(device_defaults | given))


def cache_dir() -> Path:
    """Returns the folder of converted models and compiled kernels: `ONWARD_CACHE`, else `onward` in the user's cache
    folder."""
    if path := os.environ.get("ONWARD_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onward"


def simd_level() -> SimdLevel:
    """Returns the level that `ONWARD_SIMD` names, or `native` if it is not set. Raises `StartupError` for an unknown
    level."""
    level = os.environ.get(SIMD_VARIABLE) or "native"
    if level not in get_args(SimdLevel):
        raise StartupError(f"{SIMD_VARIABLE} is {level!r}; it may be {', '.join(get_args(SimdLevel))}, or not set")
    return cast(SimdLevel, level)


def api_key_in_environment() -> str | None:
    return os.environ.get(API_KEY_VARIABLE) or None


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """Where traces go, and which requests are traced."""

    endpoint: str
    """The whole URL, with the path for traces."""
    sample_ratio: float = 1.0
    is_parent_based: bool = True
    """Whether a client's own sampling decision is followed."""


TRACES_PATH = "/v1/traces"
_SAMPLERS = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "traceidratio": (False, None),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "parentbased_traceidratio": (True, None),
}
"""Values of `OTEL_TRACES_SAMPLER`: whether a client's decision holds, and the ratio; None: `OTEL_TRACES_SAMPLER_ARG`."""


def otel_settings(endpoint: str | None, sample_ratio: float | None) -> OtelSettings | None:
    """Returns the settings of the flags, and of OpenTelemetry's own variables for flags that are not given. Returns
    None if nothing is traced. Raises `StartupError` for an invalid value."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    url = traces_url(endpoint) if endpoint else _traces_url_in_environment()
    if url is None:
        return None
    is_parent_based, ratio = _sampler_in_environment()
    return OtelSettings(url, ratio if sample_ratio is None else sample_ratio, is_parent_based)


def traces_url(endpoint: str) -> str:
    """Returns the collector's URL, with the path for traces appended if it is missing."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _traces_url_in_environment() -> str | None:
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if url := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return url
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return base.rstrip("/") + TRACES_PATH if base else None


def _sampler_in_environment() -> tuple[bool, float]:
    name = os.environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if name not in _SAMPLERS:
        raise StartupError(f"OTEL_TRACES_SAMPLER is {name!r}; it may be {', '.join(_SAMPLERS)}, or not set")
    is_parent_based, ratio = _SAMPLERS[name]
    if ratio is None:
        argument = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
        try:
            ratio = float(argument)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio <= 1:
            raise StartupError(f"OTEL_TRACES_SAMPLER_ARG is {argument!r}, not a number within 0 to 1")
    return is_parent_based, ratio


def environment_with(overrides: dict[str, str]) -> dict[str, str]:
    """Returns a copy of this process's environment with `overrides`, for a child process."""
    return os.environ | overrides


def environment_outside_of_ray(overrides: dict[str, str]) -> dict[str, str]:
    """Returns the environment for a child of a Ray worker: without Ray's own variables, among them its secrets, and without
    the number of threads that Ray sets for its workers."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"
    }
    return kept | overrides


def raylet_pid() -> int:
    """Returns the process id of the raylet that has started this Ray worker."""
    return int(os.environ.get("RAY_RAYLET_PID") or os.getppid())


def set_ray_variables(*, token: str | None) -> None:
    """Prepares the environment for Ray: it sends no usage statistics. With `token` a new Ray cluster admits only processes
    that have it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token is not None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def terminal_is_dumb() -> bool:
    """Returns whether the terminal understands no escape sequences."""
    return os.environ.get("TERM", "dumb") == "dumb"


def wants_no_color() -> bool:
    """Returns whether `NO_COLOR` is set, as https://no-color.org defines it."""
    return bool(os.environ.get("NO_COLOR"))


def hub_endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def hub_cache_dir() -> Path:
    """Returns the folder in which Hugging Face's programs keep models: `HF_HUB_CACHE`, else `hub` in `HF_HOME` or in
    the user's cache folder."""
    if path := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(path).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def hub_is_offline() -> bool:
    """Returns whether `HF_HUB_OFFLINE` forbids downloads."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def set_triton_cache() -> Path:
    """Sets the folder of Triton's compiled kernels to one in our cache, unless the environment names one, and returns
    it. Triton reads it only from the environment."""
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton")))


def quiet_torch() -> None:
    """Hides warnings of torch's C++ code, which reads its level from the environment when torch is imported. Choosing
    between its matrix libraries (`kernels.triton.library_matmul`) would print one on standard error."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def set_ucx_environment() -> str:
    """Sets the settings of UCX and nixl that the environment does not have yet, and returns the transports that UCX may
    use. Both read their settings only from the environment, when they are loaded.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    # Otherwise UCX installs its own handlers for crash signals and SIGHUP in the process that loads it.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    return os.environ.setdefault("UCX_TLS", "^shm,cuda_ipc")

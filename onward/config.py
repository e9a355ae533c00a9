"""Every setting, declared once with its help text; flags are generated from here. The environment is read only here.

One frozen dataclass per process. `ServeConfig` is what a person says; the others are what each process is told, with the
same defaults.
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
"""What `--block-size` must be a multiple of."""


def flag_field(default: Any, help: str, *, on_cuda: Any = None, alias: str | None = None) -> Any:
    """A field that becomes a command-line flag. `on_cuda` is its default on such a device, if that is another one. `alias`
    is an earlier name of the flag that is still accepted."""
    metadata = {"help": help, "on_cuda": on_cuda, "alias": alias}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class HttpServerConfig:
    """What `onward serve` and `onward router` have in common: how they listen, who may call, logs and traces."""

    host: str = flag_field("127.0.0.1", "address to listen on")
    drain_s: float = flag_field(5.0, "how long running streams may finish after SIGTERM")
    detach_ttl_s: float = flag_field(60.0, "how long a stream whose client has gone can be continued by its id")
    api_key: tuple[str, ...] = flag_field(
        (), "an admin's key, sent as a bearer token (may be given several times); a command line can be read by others"
    )
    api_key_file: str | None = flag_field(
        None, "file whose first line is an admin's API key; ONWARD_API_KEY may have it too"
    )
    api_keys: str | None = flag_field(None, "file with names, hashes, roles and limits of keys; see `onward keys`")
    insecure: bool = flag_field(False, "listen beyond this machine although there are no API keys")
    open_metrics: bool = flag_field(False, "whether /metrics is shown without a key")
    demo: bool = flag_field(
        False,
        "buttons in /ui that kill processes, to show that streams survive; loopback only, and with an admin's key",
    )
    tls_cert: str | None = flag_field(None, "certificate chain, as PEM: HTTPS instead of HTTP; needs --tls-key")
    tls_key: str | None = flag_field(None, "private key of --tls-cert, as PEM")
    cluster_key_file: str | None = flag_field(
        None, "the cluster's secret, made by `onward keygen`; needed beyond one host"
    )
    cors_origin: tuple[str, ...] = flag_field((), "origin that browsers may call from (may be given several times)")
    allowed_host: tuple[str, ...] = flag_field(
        (),
        "name that clients may call this server by, where it has no API keys; * for any (may be given several times)",
    )
    default_max_tokens: int = flag_field(
        16, "longest output of /v1/completions and /v1/generate where a request does not say (0: what fits)"
    )
    strict_fields: bool = flag_field(False, "refuse requests with unknown fields; else a response header names them")
    max_body_bytes: int = flag_field(8 << 20, "largest request body")
    max_connections: int = flag_field(4096, "connections with a request under way that one process has; more get a 503")
    log_level: str = flag_field("info", "debug, info, warning or error")
    log_format: LogFormat = flag_field("text", "text: key=value lines; json: one JSON object for each line")
    otlp_endpoint: str | None = flag_field(
        None, "URL of an OpenTelemetry collector that gets traces, over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT)"
    )
    trace_sample_ratio: float | None = flag_field(
        None, "share of the requests that are traced, where clients do not decide (default: OTEL_TRACES_SAMPLER, or 1)"
    )
    trace_url: str | None = flag_field(
        None, "page of a trace, with {trace_id} in it: the live view of /ui links streams to it"
    )


@dataclass(frozen=True, slots=True)
class ServeConfig(HttpServerConfig):
    """`onward serve`."""

    model: str = flag_field(DEFAULT_MODEL, "a Hugging Face id, a folder, a .gguf file, or the built-in default")
    revision: str | None = flag_field(None, "branch, tag or commit of a Hugging Face id (default: main)")
    chat_template: str | None = flag_field(None, "file with a Jinja chat template, instead of the model's own")
    served_model_name: str | None = flag_field(None, "the model id that clients use (default: from the model)")
    port: int = flag_field(8000, "port to listen on (0: any free one)")
    device: Device = flag_field("cpu", "where the model runs")
    gpu_memory_utilization: float = flag_field(0.9, "share of a CUDA device's memory that may be used in all")
    deterministic: bool = flag_field(
        False,
        "on CUDA, with bfloat16: a token's bits do not depend on its batch or on chunks, so that resumed streams are "
        "bit-exact",
        on_cuda=True,
    )
    dtype: Dtype = flag_field("auto", "type of the weights that are not quantized; auto: float32, on CUDA bfloat16")
    quantization: Quantization = flag_field(
        "auto", "auto: on CPU int8 for checkpoints that are quantized already, else none; int8 is CPU's, fp8 CUDA's"
    )
    load_format: LoadFormat = flag_field("auto", "dummy: random weights from the model's config")
    generation_config: GenerationConfig = flag_field(
        "auto",
        "auto: the checkpoint's generation_config.json says how to sample where requests do not; none: nobody does",
    )
    max_model_len: int | None = flag_field(None, "longest prompt plus output, in tokens (default: the model's)")
    block_size: int = flag_field(16, "tokens per KV block")
    num_kv_blocks: int | None = flag_field(None, "KV blocks in the pool (default: from free memory)")
    max_num_seqs: int = flag_field(64, "requests that run at once", on_cuda=256)
    max_num_batched_tokens: int = flag_field(
        192, "tokens that one step computes at most; longer steps make streams stutter", on_cuda=8192
    )
    speculative: str | None = flag_field(
        None, "who guesses tokens that a step then verifies: ngram:4, draft:PATH:4, eagle:PATH:1 (default: nobody)"
    )
    standby_worker: StandbyWorker = flag_field(
        "auto",
        "a second worker that takes over at once when the first one dies; auto: if there is memory for it",
    )
    prefix_caching: bool = flag_field(True, "whether requests reuse KV blocks of the prefixes that they share")
    output_caching: bool = flag_field(True, "whether full blocks of outputs join the prefix cache")
    internal_adapter: bool = flag_field(
        False, "leave the token that ended the output out of the token ids that /v1/generate and return_token_ids show"
    )
    tool_call_parser: ToolCallParser = flag_field(
        "auto", "how the model writes tool calls; auto: as its chat template shows"
    )
    reasoning_parser: ReasoningParser = flag_field(
        "auto", "how the model marks its thinking; auto: as its chat template shows"
    )
    max_queue: int = flag_field(1024, "requests that wait at most; more get a 429")
    max_queue_tokens: int = flag_field(262_144, "prompt tokens of requests that wait, at most; more get a 429")
    transport: Transport = flag_field("shm", "wire between engine and worker; shm is for one host")
    role: Role = flag_field(
        "mixed", "prefill: computes prompts for decode instances; decode: has them computed; mixed: both"
    )
    handoff_port: int | None = flag_field(
        None,
        "port where decode instances ask for prefills (0: any free one; default: 0 with --role prefill, else none)",
    )
    prefill_peers: str = flag_field("", "handoff addresses of prefill instances, tcp://HOST:PORT, separated by commas")
    local_prefill: bool = flag_field(True, "whether a decode instance computes prompts itself when no peer does")
    local_prefill_tokens: int = flag_field(
        16, "a decode instance computes so many uncached tokens itself without asking a peer"
    )
    kv_backend: KvBackend = flag_field(
        "auto", "how KV comes to a decode instance; auto: shm from local peers, else tcp"
    )
    kv_checksums: KvChecksums = flag_field("auto", "whether each KV block is checked after a transfer; auto: over tcp")
    kv_port: int = flag_field(0, "port where prefill instances write KV over tcp (0: any free one)")
    lease_s: float = flag_field(5.0, "how long a peer that has fallen silent keeps the blocks it was granted")
    offer_hold_s: float = flag_field(0.5, "how long a peer's offer may wait for free blocks before it is refused")
    handoff_timeout_s: float = flag_field(
        60.0, "how long one peer may take for one prefill, its queue included", alias="--handover-timeout-s"
    )
    router: str = flag_field("", "URLs of routers to register with, separated by commas")
    instance_name: str = flag_field(
        "instance", "how this instance's id begins, in `onward status`, /info and routers' logs"
    )
    advertise_url: str | None = flag_field(
        None, "the URL that routers reach this instance at (default: http://HOST:PORT)"
    )
    response_ttl_s: float = flag_field(3600.0, "how long a stored response can be asked for by its id")
    threads: int | None = flag_field(None, "threads of the worker (default: the number of cores)")
    api_processes: int = flag_field(1, "processes that serve HTTP")
    metrics_names: MetricsNames = flag_field(
        "onward", "vllm: /metrics also shows the names that vLLM's dashboards and autoscalers read"
    )
    pooling: Pooling = flag_field("mean", "how /v1/embeddings makes a vector of a text, where a request does not say")
    trust_request_chat_template: bool = flag_field(
        False, "whether requests may bring a chat_template of their own, which is rendered in a jailed process"
    )
    stall_timeout_s: float = flag_field(120.0, "a worker that has work and completes no step for so long is killed")
    log_interval_s: float = flag_field(5.0, "time between two log lines of the scheduler; none while idle (0: never)")
    step_log: str | None = flag_field(None, "file that gets one JSON line for each step")
    record: str | None = flag_field(
        None, "file that gets all that the engine is given and answers, for `onward replay`"
    )
    record_tokens: bool = flag_field(
        False, "record the true token ids; else each recording maps them through a secret table"
    )


RoutingPolicy = Literal["round_robin", "random", "least_loaded", "power_of_two", "prefix", "session"]


@dataclass(frozen=True, slots=True)
class RouterConfig(HttpServerConfig):
    """`onward router`."""

    port: int = flag_field(8080, "port to listen on (0: any free one)")
    instances: str = flag_field("", "URLs of instances, separated by commas, where they do not register by themselves")
    policy: RoutingPolicy = flag_field("least_loaded", "how an instance is chosen")
    prefill_policy: RoutingPolicy | None = flag_field(None, "how a prefill instance is chosen (default: --policy)")
    decode_policy: RoutingPolicy | None = flag_field(None, "how a decode instance is chosen (default: --policy)")
    preempt_retry_count: int = flag_field(3, "further attempts after one that failed, since the last delivered token")
    preempt_retry_exclude_decode: bool = flag_field(False, "keep the last decode instance out of the next attempt")
    retry_budget: float = flag_field(
        0.2, "attempts without progress, as a share of their caller's requests of the last minute"
    )
    stall_timeout_s: float = flag_field(15.0, "a stream of which nothing moves for so long is carried on elsewhere")
    restart_grace_s: float = flag_field(
        5.0, "how long an instance that restarts a process may take before its streams move"
    )
    max_queue: int = flag_field(1024, "requests that wait at most for an instance; more get a 429")
    request_timeout_s: float | None = flag_field(None, "a deadline for requests that bring none")
    report_resumes: bool = flag_field(
        False, "end each stream with a comment that says how often it was resumed", alias="--tell-resumes"
    )


def serve_default(name: str) -> Any:
    """A field with the default of `ServeConfig`'s field of this name."""
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
    device: Device = serve_default("device")
    gpu_memory_utilization: float = serve_default("gpu_memory_utilization")
    deterministic: bool = serve_default("deterministic")
    kv_backend: KvBackend | None = None
    """How peers write KV into this worker; never `auto`. None: no peer does."""
    kv_host: str = "127.0.0.1"
    """Where they reach it, for backends that need a network."""
    kv_port: int = serve_default("kv_port")
    speculative: str | None = serve_default("speculative")
    """Who drafts, as `proto.speculative_config` reads it. None: nobody."""
    standby_worker: StandbyWorker = serve_default("standby_worker")
    """Whether the pool on a CUDA device leaves room for one."""
    log_level: str = serve_default("log_level")
    log_format: LogFormat = serve_default("log_format")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    host: str = serve_default("host")
    cors_origin: tuple[str, ...] = serve_default("cors_origin")
    allowed_host: tuple[str, ...] = serve_default("allowed_host")
    max_body_bytes: int = serve_default("max_body_bytes")
    max_connections: int = serve_default("max_connections")
    max_choices: int = 16
    default_max_tokens: int = serve_default("default_max_tokens")
    strict_fields: bool = serve_default("strict_fields")
    trust_request_chat_template: bool = serve_default("trust_request_chat_template")
    pooling: Pooling = serve_default("pooling")
    default_deadline_s: float | None = None
    internal_adapter: bool = serve_default("internal_adapter")
    tool_call_parser: ToolCallParser = serve_default("tool_call_parser")
    reasoning_parser: ReasoningParser = serve_default("reasoning_parser")
    role: Role = serve_default("role")
    routers: tuple[str, ...] = ()
    url: str = ""
    """As routers reach this instance."""
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
    """Builds a process's config from the fields it shares with `source`, and those given."""
    shared = {f.name for f in dataclasses.fields(target)} & {f.name for f in dataclasses.fields(source)}
    return target(**({name: getattr(source, name) for name in shared} | overrides))


def with_defaults(config: type[Any], given: dict[str, Any]) -> Any:
    """The config with the given values; other fields have their default, on a CUDA device that device's."""
    is_cuda = given.get("device") == "cuda"
    device_defaults = {
        f.name: f.metadata["on_cuda"] for f in dataclasses.fields(config) if is_cuda and f.metadata.get("on_cuda")
    }
    if given.get("quantization") == "fp8" or given.get("dtype") in ("float32", "float16"):
        device_defaults.pop("deterministic", None)  # only bfloat16 was shown to be exact
    return config(**(device_defaults | given))


def cache_dir() -> Path:
    """Where converted models and compiled kernels live: `ONWARD_CACHE`, else `onward` in the user's cache folder."""
    if path := os.environ.get("ONWARD_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onward"


def simd_level() -> SimdLevel:
    """The level that `ONWARD_SIMD` names; `native` where it is not set. Raises `StartupError` for any other word."""
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
    """Whether a client's own decision holds."""


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
    """From the flags, and from OpenTelemetry's own variables where a flag is not given. None: nothing is traced. Raises
    `StartupError` for a value that cannot be used."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    url = traces_url(endpoint) if endpoint else _traces_url_in_environment()
    if url is None:
        return None
    is_parent_based, ratio = _sampler_in_environment()
    return OtelSettings(url, ratio if sample_ratio is None else sample_ratio, is_parent_based)


def traces_url(endpoint: str) -> str:
    """The collector's URL with the path for traces, unless it has that already."""
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
    """For a process that we start."""
    return os.environ | overrides


def terminal_is_dumb() -> bool:
    """It understands no escape sequences."""
    return os.environ.get("TERM", "dumb") == "dumb"


def wants_no_color() -> bool:
    """As https://no-color.org defines it."""
    return bool(os.environ.get("NO_COLOR"))


def hub_endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def hub_cache_dir() -> Path:
    """Where Hugging Face's programs keep models: `HF_HUB_CACHE`, else `hub` in `HF_HOME` or in the user's cache folder."""
    if path := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(path).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def hub_is_offline() -> bool:
    """`HF_HUB_OFFLINE`: nothing may be fetched."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def set_triton_cache() -> Path:
    """Triton keeps what it compiles in a folder that it takes from the environment alone. Ours, unless a person set one."""
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton")))


def quiet_torch() -> None:
    """Hides warnings of torch's C++ code, which reads its level from the environment when torch is imported. Choosing
    between its matrix libraries (`kernels.triton.library_matmul`) would print one on standard error."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def set_ucx_environment() -> str:
    """UCX and nixl take their settings from the environment alone, when they are loaded. Sets those that a person has
    not, and returns the transports that UCX may use.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    # Else UCX takes the signals of crashes, and SIGHUP, from the process it is loaded into.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    return os.environ.setdefault("UCX_TLS", "^shm,cuda_ipc")

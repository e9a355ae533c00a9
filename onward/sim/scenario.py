"""One simulated run as data: instances, wires, client requests and faults.

A run is a function of its scenario alone. So a scenario can be printed, replayed, and made smaller by removing parts.
"""

from typing import Any, Literal

import msgspec

Shape = Literal["engine", "pd", "cluster"]
Path = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/embeddings", "/v1/responses", "/v1/messages"
]
SHAPES: tuple[Shape, ...] = ("engine", "pd", "cluster")


class SimInstanceSpec(msgspec.Struct, frozen=True, omit_defaults=True, rename={"num_api_processes": "num_apis"}):
    """One instance: a supervisor, an engine, its worker and api processes."""

    name: str
    role: str = "mixed"
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_queue: int = 64
    num_api_processes: int = 1
    clock_rate: float = 1.0
    """Seconds that its clocks show for each second."""
    step_s: float = 0.02
    """Approximate duration of a worker's step."""
    restart_s: float = 0.5
    """From a process's start until it is ready."""
    local_prefill_tokens: int = 0
    prefix_caching: bool = True
    output_caching: bool = True
    num_drafts: int = 0
    """Tokens that its requests may draft in a step."""
    owns_kv_memory: bool = False
    """Whether its supervisor owns the KV memory, so that it outlives workers and engines."""
    has_standby: bool = False
    """Whether it has a standby worker. Only together with `owns_kv_memory`."""
    model: str = "hash"
    """Name of the served model. Models with different names generate different tokens."""
    aliases: list[str] = []


class SimRequest(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"is_streaming": "streams", "disconnect_at_s": "drop_at_s"}
):
    """One request, and what its client does with it."""

    name: str
    at_s: float
    path: Path = "/v1/completions"
    model: str = "hash"
    """The name in the request: of a model, an alias or a route."""
    versions: tuple[str, ...] = ("hash",)
    """Models that may answer it. One of them alone generates the whole response."""
    prompt: str = ""
    prompt_token_ids: list[int] | None = None
    is_streaming: bool = True
    max_tokens: int = 8
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    """None: the server chooses one, which is in the cursors."""
    temperature: float = 0.0
    stop: list[str] = []
    presence_penalty: float = 0.0
    logprobs: int | None = None
    pooling: str = ""
    """Pooling of an embedding request, which has `n` texts."""
    structure: str = ""
    """One of `oracle.STRUCTURES`."""
    wants_usage: bool = False
    ignore_eos: bool = False
    priority: int = 0
    deadline_ms: int | None = None
    session: str = ""
    caller: str = ""
    """The caller whose API key it has: one of the scenario's callers."""
    cache_salt: str = ""
    turns: int = 1
    """Turns of a conversation. Each further turn sends the conversation so far with a new question."""
    abort_at_s: float | None = None
    """When the client aborts it by its label or its id, in seconds after it was sent."""
    leave_at_s: float | None = None
    """When the client disconnects for good."""
    disconnect_at_s: list[float] = []
    """When the connection is dropped; the client then resumes."""
    reads_slowly: bool = False
    background: bool = False
    """Whether it is for a background response."""
    detach_s: float | None = None
    """The client disconnects as soon as it knows the id, and retrieves the response after this time."""
    cancel_at_s: float | None = None
    """When the client cancels the response by its id."""


class MessageTrigger(msgspec.Struct, frozen=True, omit_defaults=True):
    """The moment when the n-th message of a type is sent. With `wire`, only messages on wires with this text in their
    name count."""

    message: str
    nth: int = 1
    wire: str = ""


class FaultSpec(msgspec.Struct, frozen=True, omit_defaults=True, rename={"trigger": "moment"}):
    """A fault that happens once or lasts for a while."""

    kind: str
    """One of `fault_kinds.FAULT_KINDS`."""
    target: str = ""
    """Name of an instance or router, or a part of the names of wires or workers. Empty: all that the kind can
    affect."""
    at_s: float = 0.0
    """Seconds after the start of the run, or after the trigger if there is one."""
    trigger: MessageTrigger | None = None
    duration_s: float = 0.0
    rate: float = 1.0
    """For kinds that affect messages: the share of them. For `clock`: the shift, from 0 (half a minute behind) to 1
    (half a minute ahead)."""


class Scenario(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "instances": "machines",
        "requests": "asks",
        "uses_static_instances": "lists_instances",
        "expects_no_errors": "expects_calm",
    },
):
    seed: int
    shape: Shape
    instances: list[SimInstanceSpec]
    requests: list[SimRequest]
    faults: list[FaultSpec]
    num_routers: int = 0
    uses_static_instances: bool = False
    """The routers have a static list of instances and probe them, instead of receiving registrations."""
    policy: str = "least_loaded"
    preempt_retry_count: int = 3
    preempt_retry_exclude_decode: bool = False
    retry_budget: float = 10.0
    delay_s: float = 0.002
    """Approximate delay of a message."""
    callers: list[str] = []
    """Names of callers with API keys. Empty: no keys are needed. With two, an `IntruderClient` of each one tries to
    access the other's requests."""
    max_in_flight: int | None = None
    """Limit of each caller."""
    expects_no_errors: bool = False
    """Its faults come one after another, so no client may see an error of any kind."""
    name: str = ""
    """Set for a scenario that was written by hand."""
    routes: list[str] = []
    """The routers' routes, in the format of `--route`."""


class Violation(msgspec.Struct, frozen=True):
    invariant: int
    """1 to 10 of the list in docs/simulation.md; 0: the code under test failed by an exception."""
    description: str
    at_s: float


class RunResult(msgspec.Struct, frozen=True):
    scenario: Scenario
    violation: Violation | None
    trace: list[str]
    """Lines of the trace; empty unless they were kept."""
    digest: str
    """Digest of the whole trace, also if its lines were not kept. Equal digests mean equal runs."""
    virtual_s: float
    num_requests: int
    num_tokens: int
    """Tokens that clients received and compared."""
    triggered: dict[str, int]
    """Faults that took effect, by kind."""
    end_reasons: dict[str, int]
    """How requests ended, by reason."""
    num_errors: int
    """Errors that clients saw and recovered from."""
    num_resumes: int = 0


def common_fields(request: SimRequest) -> dict[str, Any]:
    """Returns the fields that have the same name in requests to all endpoints that generate. None: the field is not
    sent."""
    return {
        "seed": request.seed,
        "stop": request.stop or None,
        "presence_penalty": request.presence_penalty or None,
        "min_tokens": request.min_tokens or None,
        "ignore_eos": request.ignore_eos or None,
        "priority": request.priority or None,
        "deadline_ms": request.deadline_ms,
        "user": request.session or None,
        "cache_salt": request.cache_salt or None,
    }

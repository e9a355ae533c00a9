"""What happens in one simulated run, as data: machines, wires, what clients ask for, and what goes wrong.

A run is a function of its scenario alone. So a scenario can be printed, replayed, and made smaller by taking things out.
"""

from typing import Any, Literal

import msgspec

Shape = Literal["engine", "pd", "cluster"]
Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/embeddings", "/v1/responses"]
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
    """Of a step of its worker, about."""
    restart_s: float = 0.5
    """From a process's start until it is ready."""
    local_prefill_tokens: int = 0
    prefix_caching: bool = True
    output_caching: bool = True
    num_drafts: int = 0
    """Tokens that its requests may draft in a step."""
    owns_kv_memory: bool = False
    """Whether its supervisor owns the KV memory, so that it outlives workers and engines. Only with role `mixed`."""
    has_standby: bool = False
    """Whether a standby worker waits there. Only beside `owns_kv_memory`."""


class SimRequest(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"is_streaming": "streams", "disconnect_at_s": "drop_at_s"}
):
    """One request, and what its client does with it."""

    name: str
    at_s: float
    path: Path = "/v1/completions"
    prompt: str = ""
    prompt_token_ids: list[int] | None = None
    is_streaming: bool = True
    max_tokens: int = 8
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    """None: the server chooses, and the cursors tell."""
    temperature: float = 0.0
    stop: list[str] = []
    presence_penalty: float = 0.0
    logprobs: int | None = None
    pooling: str = ""
    """Of a request for vectors, whose texts are as many as `n`."""
    structure: str = ""
    """One of `output_structures.STRUCTURES`."""
    wants_usage: bool = False
    ignore_eos: bool = False
    priority: int = 0
    deadline_ms: int | None = None
    session: str = ""
    caller: str = ""
    """Whose key it shows: one of the scenario's callers."""
    cache_salt: str = ""
    turns: int = 1
    """A talk: each further turn asks again, with the answer so far and a new question."""
    abort_at_s: float | None = None
    """By its label or its id; seconds after it was sent."""
    leave_at_s: float | None = None
    """The client goes away for good."""
    disconnect_at_s: list[float] = []
    """Its connection is dropped, and it comes back for the rest."""
    reads_slowly: bool = False
    background: bool = False
    """A response is made although nobody waits for it."""
    detach_s: float | None = None
    """Its client goes as soon as it knows the id, and asks for it so much later."""
    cancel_at_s: float | None = None
    """By its id."""


class MessageTrigger(msgspec.Struct, frozen=True, omit_defaults=True):
    """When the n-th message of a kind is sent; over wires with this text in their name, if one is given."""

    message: str
    nth: int = 1
    wire: str = ""


class FaultSpec(msgspec.Struct, frozen=True, omit_defaults=True, rename={"trigger": "moment"}):
    """Something that goes wrong, once or for a while."""

    kind: str
    """One of `fault_kinds.FAULT_KINDS`."""
    target: str = ""
    """A process, a machine or a wire, by a part of its name; empty: all that the kind can concern."""
    at_s: float = 0.0
    """After the start; with a moment, after that."""
    trigger: MessageTrigger | None = None
    duration_s: float = 0.0
    rate: float = 1.0
    """For kinds that concern messages: which share of them."""


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
    """The routers are given a list and ask, instead of being told by the instances."""
    policy: str = "least_loaded"
    preempt_retry_count: int = 3
    preempt_retry_exclude_decode: bool = False
    retry_budget: float = 10.0
    delay_s: float = 0.002
    """Of a message, about."""
    callers: list[str] = []
    """Who has a key. Empty: nobody needs one. With two, each pries into what the other asks for."""
    max_in_flight: int | None = None
    """Of each caller."""
    expects_no_errors: bool = False
    """Its faults come one after another, so no client may see an error of any kind."""
    name: str = ""
    """Of a scenario that was written by hand."""


class Violation(msgspec.Struct, frozen=True):
    invariant: int
    """1 to 10 of the list in docs/simulation.md; 0: the code under test failed by an exception."""
    description: str
    at_s: float


class RunResult(msgspec.Struct, frozen=True):
    scenario: Scenario
    violation: Violation | None
    trace: list[str]
    """What happened, a line each; empty unless asked for."""
    digest: str
    """Of the whole trace, also where it was not kept: equal digests, equal runs."""
    virtual_s: float
    num_requests: int
    num_tokens: int
    """Delivered to clients, and compared."""
    triggered: dict[str, int]
    """Faults that took effect, by kind."""
    end_reasons: dict[str, int]
    """How requests ended, by reason."""
    num_errors: int
    """Errors that clients saw and recovered from."""
    num_resumes: int = 0


def common_fields(request: SimRequest) -> dict[str, Any]:
    """What a simulated client may say to every endpoint that generates, by the same names. None: it says nothing."""
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

"""Generates a scenario from a seed: sizes, traffic and faults, each chosen so that something interesting is likely."""

import msgspec

from onward.sim.fault_kinds import FAULT_KINDS, kinds_of
from onward.sim.oracle import STRUCTURES
from onward.sim.response_check import SCHEMAS
from onward.sim.scenario import FaultSpec, MessageTrigger, Path, Scenario, Shape, SimInstanceSpec, SimRequest
from onward.sim.seeded_random import SeededRandom
from onward.sim.vocabulary import DOOM, ENGINE_POISON, POISON

FIRST_ASK_S = 2.0
ROUTED_FIRST_ASK_S = 3.0
TEMPLATE_TOKENS = 8
"""Tokens that a chat template adds to a prompt, at most."""
MESSAGE_KINDS = ("lose", "repeat", "reorder", "delay", "partition", "cut", "refuse", "slow-kv", "break-kv")
DRAWN_APART = ("clock", "late-kv")
SEQUENTIAL_KINDS = (
    "kill-worker",
    "crash-worker",
    "kill-engine",
    "kill-api",
    "kill-instance",
    "stop-worker",
    "stop-engine",
    "stop-api",
    "drain",
)
SEQUENTIAL_GAP_S = 6.0
"""From the end of a fault to the next one. All processes are back by then."""
PATHS: dict[Path, float] = {"/v1/completions": 0.5, "/v1/chat/completions": 0.35, "/v1/generate": 0.15}
WORDS = ("the sea", "a bee", "face", "dead beef", "café", "日本", "🌊🐙", "fade", "cab", "decade")


class FaultSelection(msgspec.Struct, frozen=True):
    """The faults that a run may have."""

    kinds: frozenset[str] | None = None
    """None: all kinds of the shape."""
    rates: dict[str, float] = {}
    """Weights of kinds. All other kinds have a weight of 1."""


ALL_FAULTS = FaultSelection()


def generate_scenario(seed: int, shape: Shape, selection: FaultSelection = ALL_FAULTS) -> Scenario:
    random = SeededRandom(seed, shape)
    kinds = [kind for kind in kinds_of(shape) if selection.kinds is None or kind in selection.kinds]
    specs = _instance_specs(random.substream("machines"), shape)
    requests = _client_requests(random.substream("asks"), shape, kinds, selection)
    specs = _with_kept_memory(random.substream("memory"), _drafting(random.substream("drafts"), specs))
    if random.substream("squeeze").happens(0.35):
        specs = [_with_minimal_pool(spec, requests) for spec in specs]
    if selection.kinds is None and shape == "engine":
        requests, specs = _loaded(random.substream("load"), requests, specs)
        if random.substream("suspect").happens(0.02):
            return _suspected(random.substream("suspect under load"), seed)
    span_s = max(request.at_s for request in requests) + 3.0
    num_routers = (1 + random.below(2)) if shape == "cluster" else 0
    is_calm = shape == "cluster" and selection.kinds is None and random.happens(0.25)
    if is_calm:
        return _sequential_faults_scenario(random.substream("calm"), seed, kinds)
    return Scenario(
        seed=seed,
        shape=shape,
        instances=specs,
        requests=requests,
        faults=_faults(random.substream("faults"), shape, specs, num_routers, kinds, selection, span_s)
        + _clock_faults(random.substream("clocks"), specs, num_routers, kinds, selection, span_s)
        + _late_writes(random.substream("late writes"), specs, kinds, selection, span_s),
        num_routers=num_routers,
        policy=random.choice(("least_loaded", "round_robin", "random", "power_of_two", "prefix", "session")),
        uses_static_instances=random.happens(0.15),
        preempt_retry_count=random.weighted_choice({3: 0.8, 0: 0.1, 1: 0.1}),
        preempt_retry_exclude_decode=random.happens(0.2),
        retry_budget=random.weighted_choice({10.0: 0.5, 0.2: 0.5}),
        delay_s=random.choice((0.0005, 0.002, 0.01)),
    )


def _sequential_faults_scenario(random: SeededRandom, seed: int, kinds: list[str]) -> Scenario:
    """Generates faults one after another, each over before the next. The failure contract promises that no client
    notices such faults."""
    specs = [msgspec.structs.replace(spec, num_blocks=400, max_queue=64) for spec in _instance_specs(random, "cluster")]
    specs = _with_kept_memory(random.substream("memory"), _drafting(random.substream("drafts"), specs))
    num_routers = 1 + random.below(2)
    kinds_in_use = [kind for kind in SEQUENTIAL_KINDS if kind in kinds]
    faults: list[FaultSpec] = []
    at_s = 4.0
    for _ in range(4):
        fault = _fault(random, random.choice(kinds_in_use), specs, num_routers, 0.0)
        faults.append(msgspec.structs.replace(fault, at_s=round(at_s, 3), duration_s=min(fault.duration_s, 7.0)))
        at_s += faults[-1].duration_s + SEQUENTIAL_GAP_S
    requests = [
        _client_request(random, "cluster", index, random.uniform(3.0, at_s - 4.0), "the sea") for index in range(16)
    ]
    requests = [
        _with_client_fault(random, request, [kind for kind in kinds if kind in ("disconnect", "leave")], ALL_FAULTS)
        for request in requests
    ]
    requests = [_with_other_endpoint(random, "cluster", request, kinds) for request in requests]
    return Scenario(seed, "cluster", specs, requests, faults, num_routers, retry_budget=0.2, expects_no_errors=True)


def _suspected(random: SeededRandom, seed: int) -> Scenario:
    """Generates a suspect under load. Two workers die under a large request before it has a token. Then it waits for
    blocks behind requests of a higher priority that end one by one, and short requests keep coming."""
    spec = msgspec.structs.replace(
        _instance_spec(random, "m0", "mixed"),
        block_size=4,
        num_blocks=random.randint(19, 23),
        max_num_seqs=random.choice((3, 4)),
        max_num_batched_tokens=random.choice((8, 16)),
        max_queue=256,
    )
    large = SimRequest("large", FIRST_ASK_S, prompt=" ".join(WORDS), max_tokens=8, seed=0, ignore_eos=True)
    restarted_s = FIRST_ASK_S + 2 * spec.restart_s
    """About when the third worker starts."""
    urgent_requests = [
        SimRequest(f"u{index}", round(restarted_s, 4), prompt="face", max_tokens=8 + 4 * index, seed=index, priority=-1)
        for index in range(spec.max_num_seqs)
    ]
    interval_s = random.choice((0.03, 0.06))
    short_requests = [
        SimRequest(
            f"s{index}",
            round(restarted_s + 0.2 + index * interval_s, 4),
            prompt=random.choice(WORDS),
            max_tokens=8,
            seed=index,
        )
        for index in range(random.randint(40, 80))
    ]
    deaths = [FaultSpec("kill-worker", "m0", trigger=MessageTrigger("StepPlan", nth)) for nth in (2, 4)]
    return Scenario(
        seed,
        "engine",
        [spec],
        [large, *urgent_requests, *short_requests],
        deaths,
        delay_s=random.choice((0.0005, 0.002)),
    )


# Instances.


def _instance_specs(random: SeededRandom, shape: Shape) -> list[SimInstanceSpec]:
    if shape == "engine":
        return [_instance_spec(random, "m0", "mixed")]
    if shape == "pd":
        num_prefill = 1 + random.below(2)
        peers = [_instance_spec(random, f"p{index}", "prefill") for index in range(num_prefill)]
        return [_instance_spec(random, "d0", "decode"), *peers]
    if random.happens(0.4):
        return [_instance_spec(random, f"m{index}", "mixed") for index in range(2 + random.below(2))]
    decode = [_instance_spec(random, f"d{index}", "decode") for index in range(2)]
    return [*decode, *(_instance_spec(random, f"p{index}", "prefill") for index in range(1 + random.below(2)))]


def _instance_spec(random: SeededRandom, name: str, role: str) -> SimInstanceSpec:
    block_size = random.choice((2, 4, 8))
    return SimInstanceSpec(
        name=name,
        role=role,
        block_size=4 if role != "mixed" else block_size,
        num_blocks=random.randint(200, 640) // (4 if role != "mixed" else block_size),
        max_num_seqs=random.choice((2, 4, 8)),
        max_num_batched_tokens=random.choice((8, 16, 32, 64)),
        max_queue=random.weighted_choice({64: 0.9, 2: 0.1}),
        num_api_processes=random.weighted_choice({1: 0.7, 2: 0.3}),
        clock_rate=random.weighted_choice({1.0: 0.6, 0.95: 0.2, 1.05: 0.2}),
        step_s=random.choice((0.01, 0.03, 0.06)),
        restart_s=random.uniform(0.2, 1.5),
        local_prefill_tokens=random.weighted_choice({0: 0.7, 8: 0.3}),
        prefix_caching=random.happens(0.85),
        output_caching=random.happens(0.85),
    )


def _drafting(random: SeededRandom, specs: list[SimInstanceSpec]) -> list[SimInstanceSpec]:
    """Enables drafts in some scenarios, on some or all instances: one may have to verify what another has drafted. The
    caller passes a random substream of their own, so that all other scenarios stay the same."""
    if not random.happens(0.3):
        return specs
    counts = [random.randint(0, 5) for _ in specs]
    return [msgspec.structs.replace(spec, num_drafts=count) for spec, count in zip(specs, counts, strict=True)]


def _with_kept_memory(random: SeededRandom, specs: list[SimInstanceSpec]) -> list[SimInstanceSpec]:
    """Lets most supervisors own the KV memory, half of these with a standby worker."""
    return [
        msgspec.structs.replace(spec, owns_kv_memory=True, has_standby=random.happens(0.5))
        if random.happens(0.85)
        else spec
        for spec in specs
    ]


def _loaded(
    random: SeededRandom, requests: list[SimRequest], specs: list[SimInstanceSpec]
) -> tuple[list[SimRequest], list[SimInstanceSpec]]:
    """Adds a steady load of short requests to some scenarios, with hardly more blocks than the largest request needs. A
    request that is overtaken, or preempted in vain, then waits for as long as the load lasts."""
    if not random.happens(0.1):
        return requests, specs
    count, interval_s = random.randint(40, 80), random.choice((0.03, 0.06))
    first_s = min(request.at_s for request in requests)
    short_requests = [
        SimRequest(
            f"s{index}",
            round(first_s + index * interval_s, 4),
            prompt=random.choice(WORDS),
            max_tokens=random.randint(3, 8),
            seed=index,
            priority=random.weighted_choice({0: 0.9, -1: 0.1}),
        )
        for index in range(count)
    ]
    busy_specs = [
        msgspec.structs.replace(
            _with_minimal_pool(spec, requests), max_num_seqs=min(4, spec.max_num_seqs), max_queue=256
        )
        for spec in specs
    ]
    return [*requests, *short_requests], busy_specs


def _with_minimal_pool(spec: SimInstanceSpec, requests: list[SimRequest]) -> SimInstanceSpec:
    """Reduces the pool to hardly more than the largest request needs, so that requests preempt each other."""
    needed = max(len(request.prompt.encode()) + request.max_tokens for request in requests) + TEMPLATE_TOKENS
    num_blocks = -(-needed // spec.block_size) + 1
    return msgspec.structs.replace(spec, num_blocks=min(spec.num_blocks, num_blocks))


# Client requests.


def _client_requests(
    random: SeededRandom, shape: Shape, kinds: list[str], selection: FaultSelection
) -> list[SimRequest]:
    # One engine shows most of its bugs with few requests, and then many seeds are worth more than large ones.
    count = {
        "engine": random.weighted_choice({3: 0.3, 4: 0.3, 6: 0.2, 9: 0.2}),
        "pd": random.randint(5, 10),
        "cluster": random.randint(12, 18),
    }[shape]
    first_s = ROUTED_FIRST_ASK_S if shape == "cluster" else FIRST_ASK_S
    spread_s = random.choice((0.5, 3.0, 8.0))
    prefix = " ".join(random.choice(WORDS) for _ in range(random.randint(1, 6)))
    requests = [
        _client_request(random, shape, index, first_s + random.uniform(0.0, spread_s), prefix) for index in range(count)
    ]
    with_faults = [_with_client_fault(random, request, kinds, selection) for request in requests]
    return [_with_other_endpoint(random, shape, request, kinds) for request in with_faults]


def _client_request(random: SeededRandom, shape: Shape, index: int, at_s: float, prefix: str) -> SimRequest:
    is_long = random.happens(0.2)
    words = " ".join(random.choice(WORDS) for _ in range(random.randint(4, 9) if is_long else random.randint(1, 3)))
    prompt = f"{prefix} {words}" if random.happens(0.5) else words
    is_streaming = random.happens(0.75)
    path = random.weighted_choice(PATHS)
    temperature = random.weighted_choice({0.0: 0.4, 1.0: 0.6})
    length = random.randint(20, 60) if shape == "cluster" else random.randint(6, 30)
    return SimRequest(
        name=f"q{index}",
        at_s=round(at_s, 4),
        path=path,
        prompt=prompt,
        is_streaming=is_streaming,
        max_tokens=length,
        min_tokens=random.weighted_choice({0: 0.8, 5: 0.2}),
        n=random.weighted_choice({1: 0.8, 2: 0.15, 3: 0.05}),
        seed=random.bits(30) if not is_streaming or random.happens(0.5) else None,
        temperature=temperature,
        stop=[random.choice(("the", "ab", "🌊", " sea", "\n"))] if random.happens(0.25) else [],
        presence_penalty=random.weighted_choice({0.0: 0.8, 0.5: 0.2}),
        logprobs=random.weighted_choice({None: 0.8, 0: 0.1, 2: 0.1}),
        structure=_structure(random.substream(f"structure of {index}")),
        wants_usage=random.happens(0.4),
        ignore_eos=random.happens(0.6 if shape == "cluster" else 0.3),
        priority=random.weighted_choice({0: 0.8, -1: 0.1, 3: 0.1}),
        session=random.choice(("", "", "anna", "ben")),
        cache_salt=random.weighted_choice({"": 0.85, "anna": 0.1, "ben": 0.05}),
        turns=random.weighted_choice({1: 0.8, 2: 0.2}) if path == "/v1/chat/completions" else 1,
        reads_slowly=is_streaming and random.happens(0.05),
    )


def _structure(random: SeededRandom) -> str:
    return random.choice(list(STRUCTURES)) if random.happens(0.15) else ""


def _with_other_endpoint(random: SeededRandom, shape: Shape, request: SimRequest, kinds: list[str]) -> SimRequest:
    """Changes some requests to other endpoints or to engine poison. Uses random substreams of its own, so that all
    other requests stay the same."""
    if "poison-engine" in kinds and random.substream(f"engine poison of {request.name}").happens(0.01):
        return msgspec.structs.replace(request, prompt=f"{request.prompt}{ENGINE_POISON}", turns=1)
    request = _for_vectors(random.substream(f"vectors of {request.name}"), request)
    if request.path == "/v1/embeddings":
        return request
    request = _for_response(random.substream(f"response of {request.name}"), shape, request, kinds)
    return _for_message(random.substream(f"message of {request.name}"), request)


def _for_response(random: SeededRandom, shape: Shape, request: SimRequest, kinds: list[str]) -> SimRequest:
    """Changes some requests to `/v1/responses`, most of them to background responses. A cluster's requests ask for no
    logprobs, because a response that a router stores has none."""
    if not random.happens(0.1):
        return request
    background = random.happens(0.7)
    detaches, cancels = random.happens(0.5), random.happens(0.3)
    detach_s, cancel_at_s = round(random.uniform(0.1, 5.0), 3), round(random.uniform(0.05, 1.5), 3)
    return msgspec.structs.replace(
        request,
        path="/v1/responses",
        background=background,
        n=1,
        seed=random.bits(30) if request.seed is None else request.seed,
        structure=request.structure if request.structure in SCHEMAS else "",
        logprobs=None if shape == "cluster" else request.logprobs,
        turns=1,
        reads_slowly=False,
        detach_s=detach_s if background and detaches and "detach" in kinds else None,
        cancel_at_s=cancel_at_s if background and cancels and "cancel" in kinds else None,
    )


def _for_message(random: SeededRandom, request: SimRequest) -> SimRequest:
    """Changes some chats to the Messages API, which has one choice and no logprobs."""
    is_possible = request.path == "/v1/chat/completions" and request.structure in ("", *SCHEMAS)
    if not (is_possible and random.happens(0.25)):
        return request
    return msgspec.structs.replace(request, path="/v1/messages", n=1, logprobs=None)


def _for_vectors(random: SeededRandom, request: SimRequest) -> SimRequest:
    """Changes some requests to embedding requests."""
    if not random.happens(0.08):
        return request
    return msgspec.structs.replace(
        request,
        path="/v1/embeddings",
        pooling=random.choice(("", "mean", "last")),
        is_streaming=False,
        reads_slowly=False,
        structure="",
        turns=1,
    )


def _with_client_fault(
    random: SeededRandom, request: SimRequest, kinds: list[str], selection: FaultSelection
) -> SimRequest:
    """Adds a fault that the client or the request itself causes, or none."""
    rates = {"abort": 0.05, "leave": 0.05, "disconnect": 0.15, "deadline": 0.05, "poison": 0.02, "doom": 0.02}
    fault_rates = {kind: rate * selection.rates.get(kind, 1.0) for kind, rate in rates.items() if kind in kinds}
    if selection.kinds is not None:
        fault_rates = {kind: min(1.0, 6 * rate) for kind, rate in fault_rates.items()}
    hits = [kind for kind, rate in fault_rates.items() if random.happens(rate)]
    at_s = round(random.uniform(0.05, 2.5), 4)
    for kind in hits[:1]:
        match kind:
            case "abort":
                return msgspec.structs.replace(request, abort_at_s=at_s, turns=1)
            case "leave":
                return msgspec.structs.replace(request, leave_at_s=at_s, turns=1)
            case "disconnect":
                return msgspec.structs.replace(request, is_streaming=True, disconnect_at_s=[at_s, round(at_s * 2, 4)])
            case "deadline":
                return msgspec.structs.replace(request, deadline_ms=random.randint(100, 3000), turns=1)
            case "poison":
                return msgspec.structs.replace(request, prompt=f"{request.prompt}{POISON}", turns=1)
            case _:
                return msgspec.structs.replace(request, prompt=f"{request.prompt}{DOOM}", turns=1)
    return request


# Faults.


def _faults(
    random: SeededRandom,
    shape: Shape,
    specs: list[SimInstanceSpec],
    num_routers: int,
    kinds: list[str],
    selection: FaultSelection,
    span_s: float,
) -> list[FaultSpec]:
    weights = {
        kind: selection.rates.get(kind, 1.0)
        for kind in kinds
        if kind not in DRAWN_APART and not FAULT_KINDS[kind].is_client_fault
    }
    if not any(weights.values()):
        return []
    few = random.weighted_choice({3: 0.3, 4: 0.3, 6: 0.2, 9: 0.2})
    count = {"engine": few, "pd": random.randint(5, 10), "cluster": random.randint(12, 18)}[shape]
    if selection.kinds is not None:
        count = max(count, 3)
    faults = [_fault(random, random.weighted_choice(weights), specs, num_routers, span_s) for _ in range(count)]
    return sorted(faults, key=lambda fault: fault.at_s)


def _clock_faults(
    random: SeededRandom,
    specs: list[SimInstanceSpec],
    num_routers: int,
    kinds: list[str],
    selection: FaultSelection,
    span_s: float,
) -> list[FaultSpec]:
    """Generates clock faults. The caller passes a random substream of their own, so that all other faults stay the
    same."""
    if "clock" not in kinds or not (selection.kinds is not None or random.happens(0.3)):
        return []
    targets = [spec.name for spec in specs] + [f"r{index}" for index in range(num_routers)]
    return [
        FaultSpec(
            "clock",
            target=random.choice(targets),
            at_s=round(random.uniform(0.0, span_s), 4),
            duration_s=round(random.uniform(1.0, 10.0), 3),
            rate=round(random.uniform(0.0, 1.0), 3),
        )
        for _ in range(1 + random.below(3))
    ]


def _late_writes(
    random: SeededRandom, specs: list[SimInstanceSpec], kinds: list[str], selection: FaultSelection, span_s: float
) -> list[FaultSpec]:
    """Generates faults that kill a decode worker, or its engine, while a peer computes a prompt for it, and faults that
    make the peer notice late. The caller passes a random substream of their own, so that all other faults stay the
    same."""
    targets = [spec.name for spec in specs if spec.role == "decode"]
    if "late-kv" not in kinds or not targets or not (selection.kinds is not None or random.happens(0.4)):
        return []
    faults: list[FaultSpec] = []
    for _ in range(1 + random.below(3)):
        at_s, duration_s = round(random.uniform(1.5, span_s), 4), round(random.uniform(0.2, 2.0), 3)
        trigger = MessageTrigger("LeaseGrant", 1 + random.below(8))
        kind = random.choice(("kill-worker", "kill-worker", "kill-engine"))
        if random.happens(0.7):  # at the time when there is KV to write
            at_s = round(random.uniform(0.0, 0.1), 4)
            faults.append(FaultSpec("late-kv", at_s=0.0, trigger=trigger, duration_s=duration_s))
            faults.append(FaultSpec(kind, random.choice(targets), at_s, trigger))
        else:
            faults.append(FaultSpec("late-kv", at_s=at_s, duration_s=duration_s))
            faults.append(FaultSpec(kind, random.choice(targets), round(at_s + duration_s / 10, 4)))
    return faults


def _fault(random: SeededRandom, kind: str, specs: list[SimInstanceSpec], num_routers: int, span_s: float) -> FaultSpec:
    at_s = round(random.uniform(1.5, span_s), 4)
    if kind in MESSAGE_KINDS:
        return FaultSpec(
            kind,
            target=_wires(random, kind, specs),
            at_s=at_s,
            duration_s=round(random.uniform(0.1, 3.0), 3),
            rate=1.0 if kind == "partition" else round(random.uniform(0.05, 0.6), 3),
        )
    if kind.endswith("-router"):
        target = f"r{random.below(num_routers)}"
    else:
        target = random.choice(specs).name
    verb = kind.partition("-")[0]
    duration_range = {"stop": (0.05, 8.0), "drain": (6.5, 8.0)}.get(verb, (0.3, 3.0))
    return FaultSpec(kind, target=target, at_s=at_s, duration_s=round(random.uniform(*duration_range), 3))


def _wires(random: SeededRandom, kind: str, specs: list[SimInstanceSpec]) -> str:
    """Returns a part of the names of the wires that the fault affects."""
    name = random.choice(specs).name
    if kind in ("cut", "refuse"):
        return random.choice(("http", f">{name}", "http client"))
    if kind in ("slow-kv", "break-kv"):
        return random.choice(("", name))
    return random.choice(("", f"{name}/engine", f">{name}/engine", f"{name}/api", "peers", "http", f">{name}"))

"""Draws a scenario from a seed: sizes, traffic and faults, each chosen so that something interesting is likely."""

import msgspec

from onward.sim.fault_kinds import FAULT_KINDS, kinds_of
from onward.sim.output_structures import STRUCTURES
from onward.sim.response_check import SCHEMAS
from onward.sim.scenario import FaultSpec, MessageTrigger, Path, Scenario, Shape, SimInstanceSpec, SimRequest
from onward.sim.seeded_random import SeededRandom
from onward.sim.vocabulary import DOOM, ENGINE_POISON, POISON

FIRST_ASK_S = 2.0
ROUTED_FIRST_ASK_S = 3.0
TEMPLATE_TOKENS = 8
"""What a chat template adds to a prompt, at most."""
MESSAGE_KINDS = ("lose", "repeat", "reorder", "delay", "partition", "cut", "refuse", "slow-kv", "break-kv")
SEQUENTIAL_KINDS = (
    "kill-worker",
    "kill-engine",
    "kill-api",
    "kill-instance",
    "stop-worker",
    "stop-engine",
    "stop-api",
    "drain",
)
SEQUENTIAL_GAP_S = 6.0
"""From the end of a fault to the next: everything is back by then."""
PATHS: dict[Path, float] = {"/v1/completions": 0.5, "/v1/chat/completions": 0.35, "/v1/generate": 0.15}
WORDS = ("the sea", "a bee", "face", "dead beef", "café", "日本", "🌊🐙", "fade", "cab", "decade")


class FaultSelection(msgspec.Struct, frozen=True):
    """Which faults a run may have."""

    kinds: frozenset[str] | None = None
    """None: all of its shape."""
    rates: dict[str, float] = {}
    """How likely a kind is chosen, beside 1 for all others."""


ALL_FAULTS = FaultSelection()


def generate_scenario(seed: int, shape: Shape, choice: FaultSelection = ALL_FAULTS) -> Scenario:
    chance = SeededRandom(seed, shape)
    kinds = [kind for kind in kinds_of(shape) if choice.kinds is None or kind in choice.kinds]
    machines = _machines(chance.substream("machines"), shape)
    asks = _asks(chance.substream("asks"), shape, kinds, choice)
    machines = _drafting(chance.substream("drafts"), machines)
    if chance.substream("squeeze").happens(0.35):
        machines = [_with_minimal_pool(machine, asks) for machine in machines]
    if choice.kinds is None and shape == "engine":
        asks, machines = _loaded(chance.substream("load"), asks, machines)
        if chance.substream("suspect").happens(0.02):
            return _suspected(chance.substream("suspect under load"), seed)
    span_s = max(ask.at_s for ask in asks) + 3.0
    num_routers = (1 + chance.below(2)) if shape == "cluster" else 0
    is_calm = shape == "cluster" and choice.kinds is None and chance.happens(0.25)
    if is_calm:
        return _sequential_faults_scenario(chance.substream("calm"), seed, kinds)
    return Scenario(
        seed=seed,
        shape=shape,
        instances=machines,
        requests=asks,
        faults=_faults(chance.substream("faults"), shape, machines, num_routers, kinds, choice, span_s)
        + _clock_faults(chance.substream("clocks"), machines, num_routers, kinds, choice, span_s),
        num_routers=num_routers,
        policy=chance.choice(("least_loaded", "round_robin", "random", "power_of_two", "prefix", "session")),
        uses_static_instances=chance.happens(0.15),
        preempt_retry_count=chance.weighted_choice({3: 0.8, 0: 0.1, 1: 0.1}),
        preempt_retry_exclude_decode=chance.happens(0.2),
        retry_budget=chance.weighted_choice({10.0: 0.5, 0.2: 0.5}),
        delay_s=chance.choice((0.0005, 0.002, 0.01)),
    )


def _sequential_faults_scenario(chance: SeededRandom, seed: int, kinds: list[str]) -> Scenario:
    """One fault after another, each over before the next: what the failure contract promises is that nobody notices."""
    machines = [msgspec.structs.replace(one, num_blocks=400, max_queue=64) for one in _machines(chance, "cluster")]
    machines = _drafting(chance.substream("drafts"), machines)
    num_routers = 1 + chance.below(2)
    usual = [kind for kind in SEQUENTIAL_KINDS if kind in kinds]
    faults: list[FaultSpec] = []
    at_s = 4.0
    for _ in range(4):
        fault = _fault(chance, chance.choice(usual), machines, num_routers, 0.0)
        faults.append(msgspec.structs.replace(fault, at_s=round(at_s, 3), duration_s=min(fault.duration_s, 7.0)))
        at_s += faults[-1].duration_s + SEQUENTIAL_GAP_S
    asks = [_ask(chance, "cluster", index, chance.uniform(3.0, at_s - 4.0), "the sea") for index in range(16)]
    asks = [
        _with_client_fault(chance, ask, [kind for kind in kinds if kind in ("disconnect", "leave")], ALL_FAULTS)
        for ask in asks
    ]
    asks = [_with_other_endpoint(chance, "cluster", ask, kinds) for ask in asks]
    return Scenario(seed, "cluster", machines, asks, faults, num_routers, retry_budget=0.2, expects_no_errors=True)


def _suspected(chance: SeededRandom, seed: int) -> Scenario:
    """Two workers die under a large request before it has a token. Then it waits for room behind requests of a higher
    priority that end one by one, and short ones keep coming."""
    machine = msgspec.structs.replace(
        _machine(chance, "m0", "mixed"),
        block_size=4,
        num_blocks=chance.randint(19, 23),
        max_num_seqs=chance.choice((3, 4)),
        max_num_batched_tokens=chance.choice((8, 16)),
        max_queue=256,
    )
    large = SimRequest("large", FIRST_ASK_S, prompt=" ".join(WORDS), max_tokens=8, seed=0, ignore_eos=True)
    back_s = FIRST_ASK_S + 2 * machine.restart_s
    """About when the third worker starts."""
    urgent = [
        SimRequest(f"u{index}", round(back_s, 4), prompt="face", max_tokens=8 + 4 * index, seed=index, priority=-1)
        for index in range(machine.max_num_seqs)
    ]
    every_s = chance.choice((0.03, 0.06))
    short = [
        SimRequest(
            f"s{index}", round(back_s + 0.2 + index * every_s, 4), prompt=chance.choice(WORDS), max_tokens=8, seed=index
        )
        for index in range(chance.randint(40, 80))
    ]
    deaths = [FaultSpec("kill-worker", "m0", trigger=MessageTrigger("StepPlan", nth)) for nth in (2, 4)]
    return Scenario(seed, "engine", [machine], [large, *urgent, *short], deaths, delay_s=chance.choice((0.0005, 0.002)))


# Machines.


def _machines(chance: SeededRandom, shape: Shape) -> list[SimInstanceSpec]:
    if shape == "engine":
        return [_machine(chance, "m0", "mixed")]
    if shape == "pd":
        num_prefill = 1 + chance.below(2)
        peers = [_machine(chance, f"p{index}", "prefill") for index in range(num_prefill)]
        return [_machine(chance, "d0", "decode"), *peers]
    if chance.happens(0.4):
        return [_machine(chance, f"m{index}", "mixed") for index in range(2 + chance.below(2))]
    decode = [_machine(chance, f"d{index}", "decode") for index in range(2)]
    return [*decode, *(_machine(chance, f"p{index}", "prefill") for index in range(1 + chance.below(2)))]


def _machine(chance: SeededRandom, name: str, role: str) -> SimInstanceSpec:
    block_size = chance.choice((2, 4, 8))
    return SimInstanceSpec(
        name=name,
        role=role,
        block_size=4 if role != "mixed" else block_size,
        num_blocks=chance.randint(200, 640) // (4 if role != "mixed" else block_size),
        max_num_seqs=chance.choice((2, 4, 8)),
        max_num_batched_tokens=chance.choice((8, 16, 32, 64)),
        max_queue=chance.weighted_choice({64: 0.9, 2: 0.1}),
        num_api_processes=chance.weighted_choice({1: 0.7, 2: 0.3}),
        clock_rate=chance.weighted_choice({1.0: 0.6, 0.95: 0.2, 1.05: 0.2}),
        step_s=chance.choice((0.01, 0.03, 0.06)),
        restart_s=chance.uniform(0.2, 1.5),
        local_prefill_tokens=chance.weighted_choice({0: 0.7, 8: 0.3}),
        prefix_caching=chance.happens(0.85),
        output_caching=chance.happens(0.85),
    )


def _drafting(chance: SeededRandom, machines: list[SimInstanceSpec]) -> list[SimInstanceSpec]:
    """Some, or all: what one has guessed another may have to verify. Drawn apart, so that other seeds stay as they were."""
    if not chance.happens(0.3):
        return machines
    counts = [chance.randint(0, 5) for _ in machines]
    return [msgspec.structs.replace(one, num_drafts=count) for one, count in zip(machines, counts, strict=True)]


def _loaded(
    chance: SeededRandom, asks: list[SimRequest], machines: list[SimInstanceSpec]
) -> tuple[list[SimRequest], list[SimInstanceSpec]]:
    """Some have a steady load of short requests beside the others, and hardly more room than the largest one needs: whoever
    is passed by, or preempted in vain, waits for as long as the load lasts."""
    if not chance.happens(0.1):
        return asks, machines
    count, every_s = chance.randint(40, 80), chance.choice((0.03, 0.06))
    first_s = min(ask.at_s for ask in asks)
    short = [
        SimRequest(
            f"s{index}",
            round(first_s + index * every_s, 4),
            prompt=chance.choice(WORDS),
            max_tokens=chance.randint(3, 8),
            seed=index,
            priority=chance.weighted_choice({0: 0.9, -1: 0.1}),
        )
        for index in range(count)
    ]
    busy = [
        msgspec.structs.replace(_with_minimal_pool(one, asks), max_num_seqs=min(4, one.max_num_seqs), max_queue=256)
        for one in machines
    ]
    return [*asks, *short], busy


def _with_minimal_pool(machine: SimInstanceSpec, asks: list[SimRequest]) -> SimInstanceSpec:
    """With room for the largest request and hardly more: they push each other out."""
    needed = max(len(ask.prompt.encode()) + ask.max_tokens for ask in asks) + TEMPLATE_TOKENS
    num_blocks = -(-needed // machine.block_size) + 1
    return msgspec.structs.replace(machine, num_blocks=min(machine.num_blocks, num_blocks))


# What clients ask for.


def _asks(chance: SeededRandom, shape: Shape, kinds: list[str], choice: FaultSelection) -> list[SimRequest]:
    # One engine shows most of its faults with few requests, and then many seeds are worth more than large ones.
    count = {
        "engine": chance.weighted_choice({3: 0.3, 4: 0.3, 6: 0.2, 9: 0.2}),
        "pd": chance.randint(5, 10),
        "cluster": chance.randint(12, 18),
    }[shape]
    first_s = ROUTED_FIRST_ASK_S if shape == "cluster" else FIRST_ASK_S
    spread_s = chance.choice((0.5, 3.0, 8.0))
    prefix = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 6)))
    asks = [_ask(chance, shape, index, first_s + chance.uniform(0.0, spread_s), prefix) for index in range(count)]
    troubled = [_with_client_fault(chance, ask, kinds, choice) for ask in asks]
    return [_with_other_endpoint(chance, shape, ask, kinds) for ask in troubled]


def _ask(chance: SeededRandom, shape: Shape, index: int, at_s: float, prefix: str) -> SimRequest:
    is_long = chance.happens(0.2)
    own = " ".join(chance.choice(WORDS) for _ in range(chance.randint(4, 9) if is_long else chance.randint(1, 3)))
    prompt = f"{prefix} {own}" if chance.happens(0.5) else own
    streams = chance.happens(0.75)
    path = chance.weighted_choice(PATHS)
    temperature = chance.weighted_choice({0.0: 0.4, 1.0: 0.6})
    length = chance.randint(20, 60) if shape == "cluster" else chance.randint(6, 30)
    return SimRequest(
        name=f"q{index}",
        at_s=round(at_s, 4),
        path=path,
        prompt=prompt,
        is_streaming=streams,
        max_tokens=length,
        min_tokens=chance.weighted_choice({0: 0.8, 5: 0.2}),
        n=chance.weighted_choice({1: 0.8, 2: 0.15, 3: 0.05}),
        seed=chance.bits(30) if not streams or chance.happens(0.5) else None,
        temperature=temperature,
        stop=[chance.choice(("the", "ab", "🌊", " sea", "\n"))] if chance.happens(0.25) else [],
        presence_penalty=chance.weighted_choice({0.0: 0.8, 0.5: 0.2}),
        logprobs=chance.weighted_choice({None: 0.8, 0: 0.1, 2: 0.1}),
        structure=_structure(chance.substream(f"structure of {index}")),
        wants_usage=chance.happens(0.4),
        ignore_eos=chance.happens(0.6 if shape == "cluster" else 0.3),
        priority=chance.weighted_choice({0: 0.8, -1: 0.1, 3: 0.1}),
        session=chance.choice(("", "", "anna", "ben")),
        cache_salt=chance.weighted_choice({"": 0.85, "anna": 0.1, "ben": 0.05}),
        turns=chance.weighted_choice({1: 0.8, 2: 0.2}) if path == "/v1/chat/completions" else 1,
        reads_slowly=streams and chance.happens(0.05),
    )


def _structure(chance: SeededRandom) -> str:
    return chance.choice(list(STRUCTURES)) if chance.happens(0.15) else ""


def _with_other_endpoint(chance: SeededRandom, shape: Shape, ask: SimRequest, kinds: list[str]) -> SimRequest:
    """Drawn apart, so that other requests stay as they were."""
    if "poison-engine" in kinds and chance.substream(f"engine poison of {ask.name}").happens(0.01):
        return msgspec.structs.replace(ask, prompt=f"{ask.prompt}{ENGINE_POISON}", turns=1)
    ask = _for_vectors(chance.substream(f"vectors of {ask.name}"), ask)
    if ask.path == "/v1/embeddings":
        return ask
    return _for_response(chance.substream(f"response of {ask.name}"), shape, ask, kinds)


def _for_response(chance: SeededRandom, shape: Shape, ask: SimRequest, kinds: list[str]) -> SimRequest:
    """Some want a response, which they can ask for by its id; most of them do not wait for it. A router that keeps one has
    no logprobs of it."""
    if not chance.happens(0.1):
        return ask
    background = chance.happens(0.7)
    detaches, cancels = chance.happens(0.5), chance.happens(0.3)
    away_s, cancel_at_s = round(chance.uniform(0.1, 5.0), 3), round(chance.uniform(0.05, 1.5), 3)
    return msgspec.structs.replace(
        ask,
        path="/v1/responses",
        background=background,
        n=1,
        seed=chance.bits(30) if ask.seed is None else ask.seed,
        structure=ask.structure if ask.structure in SCHEMAS else "",
        logprobs=None if shape == "cluster" else ask.logprobs,
        turns=1,
        reads_slowly=False,
        detach_s=away_s if background and detaches and "detach" in kinds else None,
        cancel_at_s=cancel_at_s if background and cancels and "cancel" in kinds else None,
    )


def _for_vectors(chance: SeededRandom, ask: SimRequest) -> SimRequest:
    """Some want no text, but the vectors of a few."""
    if not chance.happens(0.08):
        return ask
    return msgspec.structs.replace(
        ask,
        path="/v1/embeddings",
        pooling=chance.choice(("", "mean", "last")),
        is_streaming=False,
        reads_slowly=False,
        structure="",
        turns=1,
    )


def _with_client_fault(chance: SeededRandom, ask: SimRequest, kinds: list[str], choice: FaultSelection) -> SimRequest:
    """What its client does, or the request itself brings about."""
    rates = {"abort": 0.05, "leave": 0.05, "disconnect": 0.15, "deadline": 0.05, "poison": 0.02, "doom": 0.02}
    trouble = {kind: rate * choice.rates.get(kind, 1.0) for kind, rate in rates.items() if kind in kinds}
    if choice.kinds is not None:
        trouble = {kind: min(1.0, 6 * rate) for kind, rate in trouble.items()}
    hits = [kind for kind, rate in trouble.items() if chance.happens(rate)]
    at_s = round(chance.uniform(0.05, 2.5), 4)
    for kind in hits[:1]:
        match kind:
            case "abort":
                return msgspec.structs.replace(ask, abort_at_s=at_s, turns=1)
            case "leave":
                return msgspec.structs.replace(ask, leave_at_s=at_s, turns=1)
            case "disconnect":
                return msgspec.structs.replace(ask, is_streaming=True, disconnect_at_s=[at_s, round(at_s * 2, 4)])
            case "deadline":
                return msgspec.structs.replace(ask, deadline_ms=chance.randint(100, 3000), turns=1)
            case "poison":
                return msgspec.structs.replace(ask, prompt=f"{ask.prompt}{POISON}", turns=1)
            case _:
                return msgspec.structs.replace(ask, prompt=f"{ask.prompt}{DOOM}", turns=1)
    return ask


# What goes wrong.


def _faults(
    chance: SeededRandom,
    shape: Shape,
    machines: list[SimInstanceSpec],
    num_routers: int,
    kinds: list[str],
    choice: FaultSelection,
    span_s: float,
) -> list[FaultSpec]:
    weights = {
        kind: choice.rates.get(kind, 1.0) for kind in kinds if kind != "clock" and not FAULT_KINDS[kind].is_client_fault
    }
    if not any(weights.values()):
        return []
    few = chance.weighted_choice({3: 0.3, 4: 0.3, 6: 0.2, 9: 0.2})
    count = {"engine": few, "pd": chance.randint(5, 10), "cluster": chance.randint(12, 18)}[shape]
    if choice.kinds is not None:
        count = max(count, 3)
    faults = [_fault(chance, chance.weighted_choice(weights), machines, num_routers, span_s) for _ in range(count)]
    return sorted(faults, key=lambda fault: fault.at_s)


def _clock_faults(
    chance: SeededRandom,
    machines: list[SimInstanceSpec],
    num_routers: int,
    kinds: list[str],
    choice: FaultSelection,
    span_s: float,
) -> list[FaultSpec]:
    """Drawn apart, so that other faults stay as they were."""
    if "clock" not in kinds or not (choice.kinds is not None or chance.happens(0.3)):
        return []
    targets = [one.name for one in machines] + [f"r{index}" for index in range(num_routers)]
    return [
        FaultSpec(
            "clock",
            target=chance.choice(targets),
            at_s=round(chance.uniform(0.0, span_s), 4),
            duration_s=round(chance.uniform(1.0, 10.0), 3),
            rate=round(chance.uniform(0.0, 1.0), 3),
        )
        for _ in range(1 + chance.below(3))
    ]


def _fault(
    chance: SeededRandom, kind: str, machines: list[SimInstanceSpec], num_routers: int, span_s: float
) -> FaultSpec:
    at_s = round(chance.uniform(1.5, span_s), 4)
    if kind in MESSAGE_KINDS:
        return FaultSpec(
            kind,
            target=_wires(chance, kind, machines),
            at_s=at_s,
            duration_s=round(chance.uniform(0.1, 3.0), 3),
            rate=1.0 if kind == "partition" else round(chance.uniform(0.05, 0.6), 3),
        )
    if kind.endswith("-router"):
        target = f"r{chance.below(num_routers)}"
    else:
        target = chance.choice(machines).name
    short = {"stop": (0.05, 8.0), "kill": (0.3, 3.0), "drain": (6.5, 8.0)}[kind.partition("-")[0]]
    return FaultSpec(kind, target=target, at_s=at_s, duration_s=round(chance.uniform(*short), 3))


def _wires(chance: SeededRandom, kind: str, machines: list[SimInstanceSpec]) -> str:
    """A part of the names of the wires that are hit."""
    name = chance.choice(machines).name
    if kind in ("cut", "refuse"):
        return chance.choice(("http", f">{name}", "http client"))
    if kind in ("slow-kv", "break-kv"):
        return chance.choice(("", name))
    return chance.choice(("", f"{name}/engine", f">{name}/engine", f"{name}/api", "peers", "http", f">{name}"))

"""Which instance takes a request, and which ones compute its prompt: facts in, decision out. Read this to know who wins.

First the rules that no policy may break: `can_take_request` says who can have it at all, and `reluctance` in which order of
necessity; only the least reluctant ones are put before the policy. A policy is a pure function over these. What round
robin must remember is kept by the `InstanceSelector`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onward.config import RoutingPolicy
from onward.proto.block_hash import BlockHash
from onward.router.instance_registry import InstanceInfo, InstanceState
from onward.router.prefix_index import PrefixIndex

RandBelow = Callable[[int], int]
"""A number below n."""

MAX_PREFILL_PEERS = 3

PREFIX_WEIGHT = 0.5
"""How much more load, as a share of what runs at once, a prompt that is wholly cached is worth. See `prefix`."""

SELECTABLE_STATES = (InstanceState.READY, InstanceState.RESTARTING, InstanceState.SUSPECT)


@dataclass(frozen=True, slots=True)
class RoutingCriteria:
    """What is known of a request."""

    num_prompt_tokens: int | None = None
    max_output: int | None = None
    session: str = ""
    prompt_hashes: list[BlockHash] = field(default_factory=list)
    """Of its full blocks, chained; empty where nobody has made them."""
    avoided_instances: frozenset[str] = frozenset()
    """Instances to keep out if there is another."""
    excluded_instances: frozenset[str] = frozenset()
    """Instances to keep out always."""
    fingerprint: str | None = None
    """Numerics that its tokens so far were made with: equal ones go on bit by bit."""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    instance: InstanceInfo
    prefill_peers: list[InstanceInfo]
    """Who may compute the prompt, best first. Empty: the instance itself."""


def fits_context(replica: InstanceInfo, facts: RoutingCriteria) -> bool:
    """What is not known passes: the instance will say."""
    if not replica.max_tokens or facts.num_prompt_tokens is None:
        return True
    return facts.num_prompt_tokens + (facts.max_output or 1) <= replica.max_tokens


def can_take_request(replica: InstanceInfo, facts: RoutingCriteria) -> bool:
    return (
        replica.role in ("mixed", "decode")
        and replica.state in SELECTABLE_STATES
        and replica.instance_id not in facts.excluded_instances
        and fits_context(replica, facts)
    )


def can_take_prefill(replica: InstanceInfo, facts: RoutingCriteria) -> bool:
    """It needs room for the prompt only."""
    return (
        replica.role in ("mixed", "prefill")
        and bool(replica.handoff_address)
        and replica.state in SELECTABLE_STATES
        and replica.instance_id not in facts.excluded_instances
        and (not replica.max_tokens or (facts.num_prompt_tokens or 0) <= replica.max_tokens)
    )


def can_transfer_kv(prefill: InstanceInfo, decode: InstanceInfo) -> bool:
    """The rest of their layouts was compared when they registered."""
    return (prefill.fingerprint, prefill.block_size) == (decode.fingerprint, decode.block_size)


def is_unhealthy(replica: InstanceInfo, now_s: float) -> bool:
    return replica.state is InstanceState.SUSPECT or now_s < replica.circuit_open_until_s


def preference_key(replica: InstanceInfo, facts: RoutingCriteria, now_s: float) -> tuple[bool, bool, bool, bool]:
    """Less is better, and the first difference decides: whether it lives, whether it has failed this request, whether
    the stream would stay exact, whether it can begin at once."""
    return (
        is_unhealthy(replica, now_s),
        replica.instance_id in facts.avoided_instances,
        facts.fingerprint is not None and replica.fingerprint != facts.fingerprint,
        replica.state is InstanceState.RESTARTING,
    )


def relative_load(replica: InstanceInfo) -> float:
    """Requests there, relative to what runs at once: those that the instance has told of, and what this router has
    booked or given back since. A report may be older than our latest bookings, which count in any case."""
    load = replica.load
    since = replica.num_reserved - replica.num_reserved_at_report
    return max(replica.num_reserved, load.running + load.waiting + since) / max(1, load.max_running)


def _load_key(replica: InstanceInfo) -> tuple[float, float, str]:
    load = replica.load
    return relative_load(replica), -load.free_blocks / max(1, load.num_blocks), replica.instance_id


def round_robin(candidates: Sequence[InstanceInfo], last_turns: Mapping[str, int]) -> InstanceInfo:
    """Whose last turn is longest ago. A mere counter would be unfair where candidates differ between requests."""
    return min(candidates, key=lambda replica: (last_turns.get(replica.instance_id, -1), replica.instance_id))


def random(candidates: Sequence[InstanceInfo], chance: RandBelow) -> InstanceInfo:
    return candidates[chance(len(candidates))]


def least_loaded(candidates: Sequence[InstanceInfo]) -> InstanceInfo:
    """The least requests for its size, then the most free blocks."""
    return min(candidates, key=_load_key)


def power_of_two(candidates: Sequence[InstanceInfo], chance: RandBelow) -> InstanceInfo:
    """The less loaded of two: several routers with the same old figures do not all run to the same instance."""
    if len(candidates) == 1:
        return candidates[0]
    first = chance(len(candidates))
    second = (first + 1 + chance(len(candidates) - 1)) % len(candidates)
    return least_loaded([candidates[first], candidates[second]])


def prefix(candidates: Sequence[InstanceInfo], hashes: Sequence[BlockHash], index: PrefixIndex | None) -> InstanceInfo:
    """The longest cached prefix, balanced against load.

    Each is rated by its load, less `PREFIX_WEIGHT` times the share of the prompt that it has cached; the lowest wins. So
    whoever wins is never more than `PREFIX_WEIGHT` (of what runs at once) busier than the least loaded one, a longer
    match is worth as much more load as it is longer, and where nobody knows the prompt the load decides.
    """
    if index is None or not hashes:
        return least_loaded(candidates)

    def rating(replica: InstanceInfo) -> float:
        share = index.matched_blocks(replica.instance_id, hashes) / len(hashes)
        return relative_load(replica) - PREFIX_WEIGHT * share

    return min(candidates, key=lambda replica: (rating(replica), _load_key(replica)))


def session(candidates: Sequence[InstanceInfo], key: str) -> InstanceInfo:
    """Rendezvous hashing: each session ranks all URLs in its own order and takes the first that is there. So only the
    sessions of a lost instance move, and they come back with it, although its incarnation is a new one."""
    if not key:
        return least_loaded(candidates)

    def rank(replica: InstanceInfo) -> bytes:
        return hashlib.blake2b(f"{replica.url}\n{key}".encode(), digest_size=16).digest()

    return max(candidates, key=rank)


class _PolicySelector:
    """One policy, and the turns that it has given."""

    def __init__(self, policy: RoutingPolicy, chance: RandBelow, index: PrefixIndex | None) -> None:
        self._policy: RoutingPolicy = policy
        self._chance = chance
        self._index = index
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    def select(self, candidates: Sequence[InstanceInfo], facts: RoutingCriteria) -> InstanceInfo:
        match self._policy:
            case "round_robin":
                return self._record_turn(round_robin(candidates, self._last_turns))
            case "random":
                return random(candidates, self._chance)
            case "least_loaded":
                return least_loaded(candidates)
            case "power_of_two":
                return power_of_two(candidates, self._chance)
            case "prefix":
                return prefix(candidates, facts.prompt_hashes, self._index)
            case "session":
                return session(candidates, facts.session)

    def forget_except(self, instances: frozenset[str]) -> None:
        """Forgets those that are gone."""
        if not self._last_turns.keys() <= instances:
            self._last_turns = {name: turn for name, turn in self._last_turns.items() if name in instances}

    def _record_turn(self, replica: InstanceInfo) -> InstanceInfo:
        self._turn += 1
        self._last_turns[replica.instance_id] = self._turn
        return replica


class InstanceSelector:
    def __init__(
        self,
        policy: RoutingPolicy,
        prefill_policy: RoutingPolicy | None,
        decode_policy: RoutingPolicy | None,
        chance: RandBelow,
        index: PrefixIndex | None,
    ) -> None:
        self._mixed = _PolicySelector(policy, chance, index)
        self._prefill = _PolicySelector(prefill_policy or policy, chance, index)
        self._decode = _PolicySelector(decode_policy or policy, chance, index)

    def select(self, facts: RoutingCriteria, replicas: Sequence[InstanceInfo], now_s: float) -> RoutingDecision | None:
        """None: nobody can take it now."""
        known = frozenset(replica.instance_id for replica in replicas)
        for picker in (self._mixed, self._prefill, self._decode):
            picker.forget_except(known)
        takers = [replica for replica in replicas if can_take_request(replica, facts)]
        if not takers:
            return None
        helpers = [replica for replica in replicas if can_take_prefill(replica, facts)]
        candidates = _most_preferred(takers, helpers, facts, now_s)
        picker = self._decode if any(replica.role == "decode" for replica in candidates) else self._mixed
        chosen = picker.select(candidates, facts)
        return RoutingDecision(chosen, self._select_prefill(chosen, helpers, facts, now_s))

    def _select_prefill(
        self, chosen: InstanceInfo, helpers: Sequence[InstanceInfo], facts: RoutingCriteria, now_s: float
    ) -> list[InstanceInfo]:
        """The policy's choice, then the least loaded of the rest. Doubtful ones only where all are: the instance asks
        them in this order, and waits for each."""
        if chosen.role != "decode":
            return []
        peers = [replica for replica in helpers if can_transfer_kv(replica, chosen)]
        peers = [replica for replica in peers if not is_unhealthy(replica, now_s)] or peers
        if not peers:
            return []
        best = min(preference_key(replica, facts, now_s) for replica in peers)
        first = self._prefill.select([r for r in peers if preference_key(r, facts, now_s) == best], facts)
        rest = [replica for replica in peers if replica is not first]
        rest.sort(key=lambda replica: (preference_key(replica, facts, now_s), _load_key(replica)))
        return [first, *rest][:MAX_PREFILL_PEERS]


def _most_preferred(
    takers: Sequence[InstanceInfo], helpers: Sequence[InstanceInfo], facts: RoutingCriteria, now_s: float
) -> list[InstanceInfo]:
    """Decode instances with nobody to compute prompts for them come after mixed ones, which are made for both."""

    def key(replica: InstanceInfo) -> tuple[tuple[bool, ...], bool]:
        alone = replica.role == "decode" and not any(can_transfer_kv(helper, replica) for helper in helpers)
        return preference_key(replica, facts, now_s), alone

    keys = [key(replica) for replica in takers]
    best = min(keys)
    return [replica for replica, its_key in zip(takers, keys, strict=True) if its_key == best]

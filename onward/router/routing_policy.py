"""Chooses the instance for a request, and the instances that may compute its prompt. Pure functions over facts.

First come the rules that no policy may break: `can_take_request` says which instances are able to take the request, and
`reluctance` ranks them. Only the least reluctant ones are given to the policy. The `InstanceSelector` stores what round
robin must remember.
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
    """The facts about a request that routing uses."""

    num_prompt_tokens: int | None = None
    max_output: int | None = None
    session: str = ""
    prompt_hashes: list[BlockHash] = field(default_factory=list)
    """Chained hashes of the prompt's full blocks; empty if they were not computed."""
    avoided_instances: frozenset[str] = frozenset()
    """Instances to keep out if there is another."""
    excluded_instances: frozenset[str] = frozenset()
    """Instances to keep out always."""
    fingerprint: str | None = None
    """Numerics that its tokens so far were made with: equal ones go on bit by bit."""
    preferred_url: str | None = None
    """URL of the instance that has adopted the stream's blocks."""
    model: str | None = None
    """Instances of other models never take it. None: any model."""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    instance: InstanceInfo
    prefill_peers: list[InstanceInfo]
    """Instances that may compute the prompt, best first. Empty: the instance itself computes it."""


def fits_context(instance: InstanceInfo, criteria: RoutingCriteria) -> bool:
    """Returns False only if the request is known not to fit. The instance checks unknown cases."""
    if not instance.max_tokens or criteria.num_prompt_tokens is None:
        return True
    return criteria.num_prompt_tokens + (criteria.max_output or 1) <= instance.max_tokens


def can_take_request(instance: InstanceInfo, criteria: RoutingCriteria) -> bool:
    return (
        instance.role in ("mixed", "decode")
        and criteria.model in (None, instance.model)
        and instance.state in SELECTABLE_STATES
        and instance.instance_id not in criteria.excluded_instances
        and fits_context(instance, criteria)
    )


def can_take_prefill(instance: InstanceInfo, criteria: RoutingCriteria) -> bool:
    """Returns whether the instance can compute the request's prompt for a decode instance. Unlike `can_take_request`,
    it requires room for the prompt only."""
    return (
        instance.role in ("mixed", "prefill")
        and criteria.model in (None, instance.model)
        and bool(instance.handoff_address)
        and instance.state in SELECTABLE_STATES
        and instance.instance_id not in criteria.excluded_instances
        and (not instance.max_tokens or (criteria.num_prompt_tokens or 0) <= instance.max_tokens)
    )


def can_transfer_kv(prefill: InstanceInfo, decode: InstanceInfo) -> bool:
    """Returns whether the prefill instance can send its KV to the decode instance: model, fingerprint and block size
    are equal. The rest of their layouts was compared when they registered."""
    sent = prefill.model, prefill.fingerprint, prefill.block_size
    return sent == (decode.model, decode.fingerprint, decode.block_size)


def is_unhealthy(instance: InstanceInfo, now_s: float) -> bool:
    return instance.state is InstanceState.SUSPECT or now_s < instance.circuit_open_until_s


def preference_key(instance: InstanceInfo, criteria: RoutingCriteria, now_s: float) -> tuple[bool, ...]:
    """Less is better, and the first difference decides: whether it lives, whether it has the stream's blocks, whether
    it has failed this request, whether the stream would stay exact, whether it can begin at once."""
    return (
        is_unhealthy(instance, now_s),
        criteria.preferred_url is not None and instance.url != criteria.preferred_url,
        instance.instance_id in criteria.avoided_instances,
        criteria.fingerprint is not None and instance.fingerprint != criteria.fingerprint,
        instance.state is InstanceState.RESTARTING,
    )


def relative_load(instance: InstanceInfo) -> float:
    """Returns the number of requests at the instance, divided by how many run at once. The number is that of the last
    report, plus what this router has reserved or released since. A report may be older than the latest reservations, so
    the number is never below the current reservations."""
    load = instance.load
    since = instance.num_reserved - instance.num_reserved_at_report
    return max(instance.num_reserved, load.running + load.waiting + since) / max(1, load.max_running)


def _load_key(instance: InstanceInfo) -> tuple[float, float, str]:
    load = instance.load
    return relative_load(instance), -load.free_blocks / max(1, load.num_blocks), instance.instance_id


def round_robin(candidates: Sequence[InstanceInfo], last_turns: Mapping[str, int]) -> InstanceInfo:
    """Returns the instance whose last turn is longest ago. A plain counter would be unfair if candidates differ between
    requests."""
    return min(candidates, key=lambda instance: (last_turns.get(instance.instance_id, -1), instance.instance_id))


def random(candidates: Sequence[InstanceInfo], randbelow: RandBelow) -> InstanceInfo:
    return candidates[randbelow(len(candidates))]


def least_loaded(candidates: Sequence[InstanceInfo]) -> InstanceInfo:
    """Returns the instance with the lowest relative load; among equals, the one with the largest share of free
    blocks."""
    return min(candidates, key=_load_key)


def power_of_two(candidates: Sequence[InstanceInfo], randbelow: RandBelow) -> InstanceInfo:
    """Returns the less loaded of two random instances. So several routers with the same outdated figures do not all
    choose the same instance."""
    if len(candidates) == 1:
        return candidates[0]
    first = randbelow(len(candidates))
    second = (first + 1 + randbelow(len(candidates) - 1)) % len(candidates)
    assert first != second, "two different candidates are compared"
    return least_loaded([candidates[first], candidates[second]])


def prefix(
    candidates: Sequence[InstanceInfo], hashes: Sequence[BlockHash], prefix_index: PrefixIndex | None
) -> InstanceInfo:
    """Balances the longest cached prefix against load.

    Each instance is rated by its load minus `PREFIX_WEIGHT` times the share of the prompt that it has cached; the
    lowest rating wins. So the chosen instance is at most `PREFIX_WEIGHT` (a fraction of its capacity) busier than the
    least loaded one. If no instance has cached a part of the prompt, load alone decides.
    """
    if prefix_index is None or not hashes:
        return least_loaded(candidates)

    def rating(instance: InstanceInfo) -> float:
        share = prefix_index.matched_blocks(instance.instance_id, hashes) / len(hashes)
        return relative_load(instance) - PREFIX_WEIGHT * share

    return min(candidates, key=lambda instance: (rating(instance), _load_key(instance)))


def session(candidates: Sequence[InstanceInfo], key: str) -> InstanceInfo:
    """Rendezvous hashing: each session ranks all URLs in its own order and takes the first that is there. So only the
    sessions of a lost instance move, and they come back with it, although its incarnation is a new one."""
    if not key:
        return least_loaded(candidates)

    def rank(instance: InstanceInfo) -> bytes:
        return hashlib.blake2b(f"{instance.url}\n{key}".encode(), digest_size=16).digest()

    return max(candidates, key=rank)


class _PolicySelector:
    """One policy, and the turns that it has assigned."""

    def __init__(self, policy: RoutingPolicy, randbelow: RandBelow, prefix_index: PrefixIndex | None) -> None:
        self._policy: RoutingPolicy = policy
        self._randbelow = randbelow
        self._index = prefix_index
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    def select(self, candidates: Sequence[InstanceInfo], criteria: RoutingCriteria) -> InstanceInfo:
        assert candidates, "a policy has candidates to choose from"
        match self._policy:
            case "round_robin":
                return self._record_turn(round_robin(candidates, self._last_turns))
            case "random":
                return random(candidates, self._randbelow)
            case "least_loaded":
                return least_loaded(candidates)
            case "power_of_two":
                return power_of_two(candidates, self._randbelow)
            case "prefix":
                return prefix(candidates, criteria.prompt_hashes, self._index)
            case "session":
                return session(candidates, criteria.session)

    def forget_except(self, instances: frozenset[str]) -> None:
        """Forgets instances that are gone."""
        if not self._last_turns.keys() <= instances:
            self._last_turns = {name: turn for name, turn in self._last_turns.items() if name in instances}

    def _record_turn(self, instance: InstanceInfo) -> InstanceInfo:
        self._turn += 1
        self._last_turns[instance.instance_id] = self._turn
        return instance


class InstanceSelector:
    def __init__(
        self,
        policy: RoutingPolicy,
        prefill_policy: RoutingPolicy | None,
        decode_policy: RoutingPolicy | None,
        randbelow: RandBelow,
        prefix_index: PrefixIndex | None,
    ) -> None:
        self._mixed = _PolicySelector(policy, randbelow, prefix_index)
        self._prefill = _PolicySelector(prefill_policy or policy, randbelow, prefix_index)
        self._decode = _PolicySelector(decode_policy or policy, randbelow, prefix_index)

    def select(
        self, criteria: RoutingCriteria, instances: Sequence[InstanceInfo], now_s: float
    ) -> RoutingDecision | None:
        """Returns the decision; None if no instance can take the request now."""
        instance_ids = frozenset(instance.instance_id for instance in instances)
        for selector in (self._mixed, self._prefill, self._decode):
            selector.forget_except(instance_ids)
        eligible = [instance for instance in instances if can_take_request(instance, criteria)]
        if not eligible:
            return None
        prefill_instances = [instance for instance in instances if can_take_prefill(instance, criteria)]
        candidates = _most_preferred(eligible, prefill_instances, criteria, now_s)
        selector = self._decode if any(instance.role == "decode" for instance in candidates) else self._mixed
        chosen = selector.select(candidates, criteria)
        assert can_take_request(chosen, criteria), "the chosen instance can take the request"
        return RoutingDecision(chosen, self._select_prefill(chosen, prefill_instances, criteria, now_s))

    def _select_prefill(
        self, chosen: InstanceInfo, prefill_instances: Sequence[InstanceInfo], criteria: RoutingCriteria, now_s: float
    ) -> list[InstanceInfo]:
        """Returns the peers that may compute the prompt: the policy's choice, then the rest by preference and load.
        Unhealthy peers are listed only if all are unhealthy, because the decode instance asks peers in this order and
        waits for each. Empty if the chosen instance is not a decode instance."""
        if chosen.role != "decode":
            return []
        peers = [instance for instance in prefill_instances if can_transfer_kv(instance, chosen)]
        peers = [instance for instance in peers if not is_unhealthy(instance, now_s)] or peers
        if not peers:
            return []
        best = min(preference_key(instance, criteria, now_s) for instance in peers)
        first = self._prefill.select(
            [instance for instance in peers if preference_key(instance, criteria, now_s) == best], criteria
        )
        assert can_take_prefill(first, criteria), "the chosen prefill peer can take the prompt"
        assert can_transfer_kv(first, chosen), "the chosen prefill peer can send its KV to the instance"
        rest = [instance for instance in peers if instance is not first]
        rest.sort(key=lambda instance: (preference_key(instance, criteria, now_s), _load_key(instance)))
        return [first, *rest][:MAX_PREFILL_PEERS]


def _most_preferred(
    eligible: Sequence[InstanceInfo],
    prefill_instances: Sequence[InstanceInfo],
    criteria: RoutingCriteria,
    now_s: float,
) -> list[InstanceInfo]:
    """Ranks decode instances without a prefill instance behind mixed ones, which can compute prompts efficiently
    themselves."""

    def key(instance: InstanceInfo) -> tuple[tuple[bool, ...], bool]:
        alone = instance.role == "decode" and not any(
            can_transfer_kv(prefill_instance, instance) for prefill_instance in prefill_instances
        )
        return preference_key(instance, criteria, now_s), alone

    keys = [key(instance) for instance in eligible]
    best = min(keys)
    return [instance for instance, instance_key in zip(eligible, keys, strict=True) if instance_key == best]

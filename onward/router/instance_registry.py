"""The registered instances: their state and load.

An instance is identified by its incarnation. It announces itself every second, or, if it is in the static list, is
probed every second; both renew the same lease. What the router observes itself (lost connections, stalls) is stored
beside it. An instance that refuses connections stays suspect, whatever it announces, until a probe reaches it.

    registered ── silent 3 s ──> suspect ── silent 8 s ──> gone, forgotten
        └───────── says `leaving`, or its URL has a new incarnation ──────^

`routing_policy` chooses an instance. This module takes the time and messages; it knows neither sockets nor clocks.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from onward import log
from onward.errors import StartupError
from onward.pd import layout
from onward.proto import SCHEMA_VERSION
from onward.proto.router import (
    MAX_MODEL_NAME_CHARS,
    MAX_MODEL_NAMES,
    InstanceLoad,
    Registration,
    RegistrationReply,
)
from onward.router.prefix_index import RESEND_ALL, PrefixIndex
from onward.transport.addresses import check_handoff_address
from onward.transport.http_urls import parse_server_url
from onward.web.json_body import short_repr

_logger = logging.getLogger(__name__)

REGISTER_INTERVAL_S = 1.0
SUSPECT_AFTER_S = 3.0
"""An instance that has been silent for this time is suspect: a new request is sent to it only if no other instance
can take the request. Streams that run there go on."""
GONE_AFTER_S = 8.0
"""An instance that has been silent for this time is gone: it is removed and gets no requests until it registers
again. Its streams move to other instances, except those that still get tokens."""

PROBE_EVERY_S = 1.0
PROBE_LOST_AFTER_S = 5.0
"""A probe without a result is given up after this time."""

FAILURES_TO_OPEN_CIRCUIT = 3
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 10.0

MAX_INSTANCES = 1024
KNOWN_MODEL_S = 60.0
"""How long a model is known after its last instance has gone. Requests wait for an instance of it to come back, and are
not told that the model is unknown."""
MAX_NAME_CHARS = 64
"""Limit of the name of an instance or a node."""
ROLES = ("mixed", "prefill", "decode")
LEAVING = "leaving"


class InstanceState(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    SUSPECT = "suspect"
    GONE = "gone"


REPORTED_STATES = tuple(
    state.value
    for state in (InstanceState.STARTING, InstanceState.READY, InstanceState.RESTARTING, InstanceState.DRAINING)
)


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as it is now, for choosing among them."""

    instance_id: str
    url: str
    role: str
    state: InstanceState
    fingerprint: str
    handoff_address: str
    max_tokens: int
    block_size: int
    load: InstanceLoad
    num_reserved: int
    """Streams that this router has on it, or prefills that it was named for."""
    circuit_open_until_s: float
    """Not chosen before this time, unless no other instance can take the request."""
    num_reserved_at_report: int = 0
    """`num_reserved` when `load` was reported: these requests are counted in both."""
    tokenizer_hash: str = ""
    """Hash of the instance's tokenizer and chat template."""
    model: str = ""
    model_aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class CircuitBreaker:
    """Keeps requests away from an instance that has failed some in a row.

    closed ── 3 failures ──> open ── pause ──> half-open: one request per pause ── success ──> closed
                              ^───── twice the pause, up to a bound ──────┘ failure
    """

    failures: int = 0
    open_s: float = 0.0
    open_until_s: float = 0.0
    on_trial: bool = False

    def record_failure(self, now_s: float) -> None:
        self.failures += 1
        # When an instance dies all of its streams fail together; that is one fault, and lengthens no pause.
        told_before = now_s < self.open_until_s and not self.on_trial
        if self.failures < FAILURES_TO_OPEN_CIRCUIT or told_before:
            return
        self.on_trial = False
        self.open_s = min(2 * self.open_s, MAX_OPEN_S) if self.open_s else FIRST_OPEN_S
        self.open_until_s = now_s + self.open_s

    def start_trial(self, now_s: float) -> None:
        """Marks a trial request as sent. No other request is sent to the instance during a trial."""
        if self.open_s:
            assert self.failures >= FAILURES_TO_OPEN_CIRCUIT, "a circuit opens after several failures"
            self.on_trial = True
            self.open_until_s = now_s + self.open_s

    def reset(self) -> None:
        self.failures = 0
        self.open_s = 0.0
        self.open_until_s = 0.0
        self.on_trial = False


class Reservation:
    """A reserved place at an instance. `release` has an effect once; releasing again, or late, changes nothing."""

    __slots__ = ("_all", "instance_id")

    def __init__(self, instance_id: str, all_of_it: "set[Reservation]") -> None:
        self.instance_id = instance_id
        self._all = all_of_it
        all_of_it.add(self)

    def release(self) -> None:
        self._all.discard(self)


@dataclass(slots=True)
class _RegisteredInstance:
    registration: Registration
    last_seen_at_s: float
    is_suspected: bool = False
    """By this router, since the last sign of life."""
    is_unreachable: bool = False
    """The last connection to it failed. Its own registrations do not show that it can be reached."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    reservations: set[Reservation] = field(default_factory=set)
    num_reserved_at_report: int = 0

    @property
    def url(self) -> str:
        return self.registration.url

    def state(self, now_s: float) -> InstanceState:
        silent_s = now_s - self.last_seen_at_s
        if silent_s >= GONE_AFTER_S:
            return InstanceState.GONE
        reported = InstanceState(self.registration.state)
        if reported in (InstanceState.STARTING, InstanceState.DRAINING):
            return reported  # excluded in any case; a suspect instance is used if there is no other
        is_doubted = self.is_unreachable or (self.is_suspected and reported is InstanceState.READY)
        if silent_s >= SUSPECT_AFTER_S or is_doubted:
            return InstanceState.SUSPECT
        return reported

    def info(self, now_s: float) -> InstanceInfo:
        registration = self.registration
        return InstanceInfo(
            instance_id=registration.instance,
            url=registration.url,
            role=registration.role,
            state=self.state(now_s),
            fingerprint=registration.fingerprint,
            handoff_address=registration.handoff_address,
            max_tokens=registration.max_tokens,
            block_size=registration.block_size,
            load=registration.load,
            num_reserved=len(self.reservations),
            circuit_open_until_s=self.breaker.open_until_s,
            num_reserved_at_report=self.num_reserved_at_report,
            tokenizer_hash=registration.tokenizer_hash,
            model=registration.model,
            model_aliases=tuple(registration.model_aliases),
        )


@dataclass(slots=True)
class _ProbeSchedule:
    is_static: bool
    """In the router's own list. Others are asked only until they are reached."""
    begun_s: float = -math.inf
    under_way: bool = False

    def due(self, now_s: float) -> bool:
        return now_s - self.begun_s >= (PROBE_LOST_AFTER_S if self.under_way else PROBE_EVERY_S)


class InstanceRegistry:
    def __init__(self, incarnation: str, *, wants_kv_events: bool) -> None:
        self._incarnation = incarnation
        self.index: PrefixIndex | None = PrefixIndex() if wants_kv_events else None
        self._members: dict[str, _RegisteredInstance] = {}
        self._probes: dict[str, _ProbeSchedule] = {}
        self._gone: list[str] = []
        self._replaced: deque[str] = deque(maxlen=MAX_INSTANCES)
        """Incarnations whose URL belongs to a newer one. Their late messages must not reclaim it."""
        self._generations: OrderedDict[str, int] = OrderedDict()
        """The highest generation that has registered under a name. Those below it are refused, also after it has gone."""
        self._past_models: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()
        """Aliases of models whose last instance has gone, and until when they are known."""
        self._now_s = -math.inf

    def register(self, registration: Registration, now_s: float) -> RegistrationReply:
        self._now_s = now_s
        registration = msgspec.structs.replace(registration, url=_normalize_url(registration.url))
        if registration.state == LEAVING:
            self._remove(registration.instance)
            return self._answer()
        error = self._rejection_reason(registration)
        if error is not None:
            self._remove(registration.instance)
            return self._answer(error=error)
        next_kv_event = self._apply_kv_events(registration)
        self._store(registration, now_s)
        return self._answer(next_kv_event=next_kv_event, num_others=self.num_ready_others(registration.url))

    def add_static(self, url: str) -> None:
        self._probes[_normalize_url(url)] = _ProbeSchedule(is_static=True)

    def due_probes(self, now_s: float) -> list[str]:
        """Returns the URLs to probe now. Each is probed separately, so that a slow instance delays no other probe."""
        due = [url for url, probe in self._probes.items() if probe.due(now_s)]
        for url in due:
            self._probes[url].begun_s, self._probes[url].under_way = now_s, True
        return due

    def on_probe_result(self, url: str, registration: Registration | None, now_s: float) -> str | None:
        """Handles the result of a probe; a failed probe counts as silence. Returns why the instance is refused, if it
        is."""
        url = _normalize_url(url)
        probe = self._probes.get(url)
        if probe is not None:
            probe.under_way = False
        if registration is None:
            return None
        self._clear_unreachable(registration.instance, url)
        if probe is None or not probe.is_static:
            return None  # it registers by itself
        # The URL of the list is used, because the operator knows how to reach the instance.
        return self.register(msgspec.structs.replace(registration, url=url), now_s).error or None

    def next_kv_event(self, url: str) -> int:
        """Returns the number of the next prefix-cache event to request from a static instance."""
        member = self._find_by_url(_normalize_url(url))
        if self.index is None or member is None:
            return RESEND_ALL
        return self.index.next_event_number(member.registration.instance)

    def tick(self, now_s: float) -> list[str]:
        """Instances that are gone since the last call: their streams must move."""
        self._now_s = now_s
        for instance_id, member in list(self._members.items()):
            if member.state(now_s) is InstanceState.GONE:
                silent_s = now_s - member.last_seen_at_s
                _logger.warning(log.event("instance lost", id=instance_id, url=member.url, silent_s=silent_s))
                self._remove(instance_id)
        urls = {member.url for member in self._members.values()}
        self._probes = {url: probe for url, probe in self._probes.items() if probe.is_static or url in urls}
        while self._past_models and next(iter(self._past_models.values()))[1] <= now_s:
            self._past_models.popitem(last=False)
        gone, self._gone = self._gone, []
        return gone

    def known_models(self) -> Mapping[str, AbstractSet[str]]:
        """Returns the aliases of each model that has a registered instance, or had one a short while ago."""
        known: dict[str, AbstractSet[str]] = {model: aliases for model, (aliases, _) in self._past_models.items()}
        for member in self._members.values():
            known[member.registration.model] = known.get(member.registration.model, frozenset()) | frozenset(
                member.registration.model_aliases
            )
        return known

    def list_instances(self, now_s: float) -> list[InstanceInfo]:
        self._now_s = now_s
        return [member.info(now_s) for member in self._members.values()]

    def get(self, instance_id: str) -> InstanceInfo | None:
        member = self._members.get(instance_id)
        return member.info(self._now_s) if member else None

    def find_by_url(self, url: str) -> InstanceInfo | None:
        member = self._find_by_url(url)
        return member.info(self._now_s) if member else None

    def record_failure(self, instance_id: str, now_s: float) -> None:
        """Marks an instance as suspect and counts a failure in its circuit breaker, after a connection was refused or
        lost, or a stream stalled."""
        self._now_s = now_s
        if member := self._members.get(instance_id):
            member.is_suspected = True
            member.breaker.record_failure(now_s)

    def record_unreachable(self, instance_id: str, now_s: float) -> None:
        """Records a failed connection to an instance and starts to probe it. The probes find out when it can be reached
        again, so that no client's request has to try."""
        self.record_failure(instance_id, now_s)
        if member := self._members.get(instance_id):
            member.is_unreachable = True
            self._probes.setdefault(member.url, _ProbeSchedule(is_static=False))

    def record_success(self, instance_id: str, now_s: float) -> None:
        """Clears an instance's suspicion and resets its circuit breaker, because it has produced tokens. Stops the
        probes that `record_unreachable` has started."""
        self._now_s = now_s
        if member := self._members.get(instance_id):
            member.is_suspected = False
            member.breaker.reset()
            self._clear_unreachable(instance_id, member.url)

    def _clear_unreachable(self, instance_id: str, url: str) -> None:
        member = self._members.get(instance_id)
        if member is None or member.url != url or not member.is_unreachable:
            return
        member.is_unreachable = False
        probe = self._probes.get(url)
        if probe is not None and not probe.is_static:
            del self._probes[url]

    def reserve(self, instance_id: str) -> Reservation:
        """Reserves a place. A reservation at an instance that is gone has no effect, and can still be released."""
        member = self._members.get(instance_id)
        if member is None:
            return Reservation(instance_id, set())
        member.breaker.start_trial(self._now_s)
        return Reservation(instance_id, member.reservations)

    def _store(self, registration: Registration, now_s: float) -> None:
        assert registration.state in REPORTED_STATES, "only a checked registration is stored"
        existing = self._find_by_url(registration.url)
        if existing is not None and existing.registration.instance != registration.instance:
            previous = existing.registration.instance
            _logger.warning(log.event("instance replaced", id=previous, url=existing.url, by=registration.instance))
            self._replaced.append(previous)
            self._remove(previous)
        self._store_generation(registration)
        member = self._members.setdefault(registration.instance, _RegisteredInstance(registration, now_s))
        assert len(self._members) <= MAX_INSTANCES, "the number of instances is bounded"
        # Whether another address can be reached is not known yet.
        member.is_unreachable = member.is_unreachable and member.url == registration.url
        member.registration = registration
        member.last_seen_at_s = now_s
        member.num_reserved_at_report = len(member.reservations)
        member.is_suspected = False

    def _store_generation(self, registration: Registration) -> None:
        """Removes earlier starts of an instance. They may still run, on a machine that has lost its connection."""
        if not registration.generation:
            return
        for previous, member in list(self._members.items()):
            if member.registration.name == registration.name and previous != registration.instance:
                _logger.warning(log.event("instance replaced", id=previous, url=member.url, by=registration.instance))
                self._remove(previous)
        self._generations[registration.name] = registration.generation
        self._generations.move_to_end(registration.name)
        while len(self._generations) > MAX_INSTANCES:
            self._generations.popitem(last=False)

    def _apply_kv_events(self, registration: Registration) -> int:
        """Applies a registration's KV events to the prefix index and returns the number of the next expected change.
        For a new engine, the index first forgets the instance: each engine counts its changes from 0 and begins with an
        empty cache."""
        if self.index is None:
            return RESEND_ALL
        previous = self._members.get(registration.instance)
        if previous is not None and previous.registration.engine != registration.engine:
            self.index.forget(registration.instance)
        if registration.kv_events is None:
            return self.index.next_event_number(registration.instance)
        return self.index.apply(registration.instance, registration.kv_events)

    def num_ready_others(self, url: str) -> int:
        """Instances that are ready to take the streams of the one at this URL, beside itself. -1: it is not known."""
        own = self._find_by_url(_normalize_url(url))
        if own is None:
            return -1
        others = [
            member
            for member in self._members.values()
            if member is not own and member.registration.model == own.registration.model
        ]
        return sum(
            other.registration.role != "prefill" and other.state(self._now_s) is InstanceState.READY for other in others
        )

    def _answer(self, *, error: str = "", next_kv_event: int = RESEND_ALL, num_others: int = -1) -> RegistrationReply:
        wants_kv_events = self.index is not None
        return RegistrationReply(
            self._incarnation, REGISTER_INTERVAL_S, error, wants_kv_events, next_kv_event, num_others
        )

    def _remove(self, instance_id: str) -> None:
        """Removes an instance and its reservations. Releasing such a reservation later has no effect, because the
        reservations are stored in the removed `_RegisteredInstance`. The instance's model stays known for
        KNOWN_MODEL_S."""
        member = self._members.pop(instance_id, None)
        if member is None:
            return
        self._gone.append(instance_id)
        self._remember_model(member.registration)
        if self.index is not None:
            self.index.forget(instance_id)

    def _remember_model(self, registration: Registration) -> None:
        aliases = frozenset(registration.model_aliases)
        self._past_models[registration.model] = aliases, self._now_s + KNOWN_MODEL_S
        self._past_models.move_to_end(registration.model)
        while len(self._past_models) > MAX_INSTANCES:
            self._past_models.popitem(last=False)

    def _find_by_url(self, url: str) -> _RegisteredInstance | None:
        return next((member for member in self._members.values() if member.url == url), None)

    def _rejection_reason(self, new: Registration) -> str | None:
        """Returns why an instance is refused, or None. Existing instances decide, except the one that it replaces."""
        if error := _validation_error(new):
            return error
        existing = self._find_by_url(new.url)
        if new.instance in self._replaced and existing is not None and existing.registration.instance != new.instance:
            return f"another instance has registered at {new.url} since"
        if error := self._generation_error(new):
            return error
        others = [
            member.registration
            for instance_id, member in self._members.items()
            if instance_id != new.instance and member.url != new.url
        ]
        if len(others) >= MAX_INSTANCES:
            return f"there are {MAX_INSTANCES} instances already"
        return _incompatibility(new, others)

    def _generation_error(self, new: Registration) -> str | None:
        highest = self._generations.get(new.name, 0)
        if new.generation < highest:
            return f"generation {highest} of {new.name} has registered, and this is generation {new.generation}"
        if not new.generation or new.generation > highest:
            return None
        for instance_id, member in self._members.items():
            is_other = instance_id != new.instance and member.url != new.url
            if is_other and member.registration.name == new.name:
                return f"another instance has registered as generation {highest} of {new.name}"
        return None


def _validation_error(new: Registration) -> str | None:
    if new.schema_version != SCHEMA_VERSION:
        return f"schema_version is {SCHEMA_VERSION} here and {new.schema_version} there"
    if not new.instance:
        return "instance is empty"
    try:
        parse_server_url(new.url)
    except ValueError as fault:
        return f"url is {short_repr(new.url)}, which is not the address of a server: {fault}"
    try:
        if new.handoff_address:
            check_handoff_address(new.handoff_address, "handoff_address")
    except StartupError as fault:
        return f"handoff_address is wrong: {fault.message}"
    for field_name, names in (("model", [new.model]), ("model_aliases", new.model_aliases)):
        if any(not 0 < len(name) <= MAX_MODEL_NAME_CHARS for name in names):
            shown = short_repr(names if field_name == "model_aliases" else new.model)
            return f"{field_name} is {shown}; a name has 1 to {MAX_MODEL_NAME_CHARS} characters"
    if len(new.model_aliases) > 2 * MAX_MODEL_NAMES:
        return f"model_aliases is a list of {len(new.model_aliases)} names, more than {2 * MAX_MODEL_NAMES}"
    for field_name, name in (("name", new.name), ("node", new.node)):
        if len(name) > MAX_NAME_CHARS:
            return f"{field_name} is {short_repr(name)}, longer than {MAX_NAME_CHARS} characters"
    if new.generation and not new.name:
        return "generation is given without a name"
    if new.role not in ROLES:
        return f"role is {new.role!r}, not one of {', '.join(ROLES)}"
    if new.state not in REPORTED_STATES:
        return f"state is {new.state!r}, not one of {', '.join((*REPORTED_STATES, LEAVING))}"
    return None


def _normalize_url(url: str) -> str:
    """Returns the canonical form of a URL. An invalid one stays as it is, and `_validation_error` refuses it."""
    try:
        return str(parse_server_url(url))
    except ValueError:
        return url


def _incompatibility(new: Registration, others: list[Registration]) -> str | None:
    """Instances of one model that pass KV to each other have one layout; a mixed instance without a handoff address passes
    none, and may compute in its own way: streams that move there go on, if not bit by bit. Those of different models have
    nothing to do with each other."""
    if not _transfers_kv(new) or new.kv_layout is None:
        return None
    for other in others:
        if other.model == new.model and _transfers_kv(other) and other.kv_layout is not None:
            return layout.layout_difference(other.kv_layout, new.kv_layout)
    return None


def _transfers_kv(registration: Registration) -> bool:
    return registration.role != "mixed" or bool(registration.handoff_address)

"""Random traffic of callers with limits: whatever is submitted, ended, aborted, resubmitted or lost, limits hold."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.proto.engine import CallerLimits, TokenDelta
from tests.engine.harness import Client, Harness
from tests.engine.traffic import CRASHES, ENDINGS, REQUESTS, SHAPES, STEPS, WHICH, Action, Actor

CALLERS = ("ann", "bob")

LIMITS = st.builds(CallerLimits, st.none() | st.integers(1, 4), st.none() | st.integers(1, 4000))
SUBMIT = st.tuples(
    st.just("submit"),
    st.tuples(REQUESTS, st.sampled_from(CALLERS)).map(lambda drawn: drawn[0] | {"caller": drawn[1]}),
)
# An api never says the same twice: what it says again has a higher epoch.
RESUBMIT = st.tuples(st.just("resubmit"), WHICH)
PAUSE = st.tuples(st.just("pause"), st.floats(0, 90))
TRAFFIC = st.one_of(SUBMIT, SUBMIT, SUBMIT, STEPS, STEPS, ENDINGS, RESUBMIT, CRASHES, PAUSE)


@dataclass(frozen=True, slots=True)
class Use:
    at_s: float
    caller: str
    num_tokens: int
    begins: bool
    """A new request was let in, with a prompt of so many tokens."""


class WatchedHarness(Harness):
    """Notes what each caller uses, in order, as its clients see it."""

    def __init__(self, limits: dict[str, CallerLimits], **shape: object) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]
        self.limits = limits
        self.uses: list[Use] = []

    def submit(self, request_id: str, prompt: list[int], **fields: object) -> Client:
        caller = str(fields["caller"])
        client = super().submit(request_id, prompt, caller_limits=self.limits[caller], **fields)  # type: ignore[arg-type]
        if client.accepted:
            self.uses.append(Use(self.now_s, caller, len(prompt), begins=True))
        return client

    def crash_engine(self) -> None:
        """The next one begins with full buckets."""
        self.uses.clear()
        super().crash_engine()

    def _take(self, delta: TokenDelta) -> None:
        super()._take(delta)
        if delta.token_ids:
            caller = self.clients[delta.request_id].submit.caller
            self.uses.append(Use(self.now_s, caller, len(delta.token_ids), begins=False))

    def check_in_flight(self) -> None:
        in_flight = Counter(request.caller for request in self.core._live.values())
        for caller, limits in self.limits.items():
            assert limits.max_in_flight is None or in_flight[caller] <= limits.max_in_flight

    def check_tokens(self) -> None:
        """Whenever a new one is let in, all that was used before, over any time, had been within the limit. What comes
        behind the last one is its own prompt, and the outputs of those in flight."""
        for caller, limits in self.limits.items():
            if limits.tokens_per_minute is not None:
                _check_windows([use for use in self.uses if use.caller == caller], limits.tokens_per_minute)


def _check_windows(uses: list[Use], tokens_per_minute: int) -> None:
    for end, admission in enumerate(uses):
        if not admission.begins:
            continue
        used = 0
        for earlier in reversed(uses[:end]):
            used += earlier.num_tokens
            window_s = admission.at_s - earlier.at_s
            assert used <= tokens_per_minute * (1 + window_s / 60) + 1e-6


def act(harness: WatchedHarness, actor: Actor, action: Action) -> None:
    match action:
        case "pause", float(seconds):
            harness.tick(seconds)
        case _:
            actor.act(action)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SHAPES, st.fixed_dictionaries(dict.fromkeys(CALLERS, LIMITS)), st.lists(TRAFFIC, min_size=10, max_size=80))
def test_no_caller_ever_has_or_uses_more_than_its_limits(shape: dict, limits: dict, actions: list[Action]) -> None:
    harness = WatchedHarness(limits, **(shape | {"max_queue": 6, "max_queue_tokens": 100}))
    actor = Actor(harness)
    for action in actions:
        act(harness, actor, action)
        harness.check()
        harness.check_in_flight()
        if action == ("crash_engine", None):
            harness.check_tokens()
    harness.check_tokens()
    harness.start_worker()
    harness.run_until_idle()
    harness.check_tokens()
    harness.core.audit_idle()
    _check_refusals(harness)


def _check_refusals(harness: WatchedHarness) -> None:
    """Only new requests were refused, with a time to come back; what was let in got its tokens."""
    for client in harness.clients.values():
        if client.error_code in ("overloaded", "rate_limited"):
            assert client.error is not None and (client.error.retry_after_s or 0) >= 1
            assert not client.accepted and client.tokens == []
        elif client.finish_reason in ("stop", "length"):
            assert client.tokens == harness.expected(client)[: len(client.tokens)]

"""Random traffic over random pools: whatever happens, clients get the tokens of an undisturbed run, once and in order."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.harness import Harness

PROMPTS = st.integers(0, 3).flatmap(
    # Few families of prompts, so that prefixes are shared all the time.
    lambda family: st.integers(1, 40).map(lambda n: [(family * 7 + i // 3) % 50 for i in range(n)])
)
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(1, 24),  # max_tokens
    st.integers(0, 2),  # priority
    st.integers(0, 3),  # seed; 0 means greedy
    st.sampled_from([(), (3,), (5, 9, 11)]),  # end tokens
    st.integers(0, 4),  # min_tokens
    st.sampled_from(["", "salt"]),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), REQUESTS),
        st.tuples(st.just("plan"), st.none()),
        st.tuples(st.just("answer"), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("crash_worker"), st.none()),
        st.tuples(st.just("crash_engine"), st.none()),
    ),
    max_size=60,
)
SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(17, 40),
        "block_size": st.sampled_from([4, 5]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 16, 64]),
        "prefix_caching": st.booleans(),
        "output_caching": st.booleans(),
    }
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, ACTIONS)
def test_every_client_gets_exactly_its_tokens_whatever_happens(shape: dict, actions: list) -> None:
    harness = Harness(**shape)
    aborted: set[str] = set()
    for kind, value in actions:
        _act(harness, kind, value, aborted)
    harness.run_until_idle()
    for request_id, client in harness.clients.items():
        expected = harness.expected(client)
        assert client.num_finishes == 1
        if client.finish_reason == "abort":
            assert request_id in aborted
            assert client.tokens == expected[: len(client.tokens)]
        elif client.error_code != "crashed_worker":
            assert client.tokens == expected
    harness.core.audit_idle()


def _act(harness: Harness, kind: str, value, aborted: set[str]) -> None:
    match kind:
        case "submit":
            prompt, max_tokens, priority, seed, end, min_tokens, salt = value
            harness.submit(
                f"r{len(harness.clients)}",
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                seed=seed,
                temperature=1.0 if seed else 0.0,
                end=end,
                min_tokens=min(min_tokens, max_tokens),
                cache_salt=salt,
            )
        case "plan":
            harness.plan()
        case "answer" if harness.plans:
            harness.answer()
        case "abort" if harness.clients:
            request_id = list(harness.clients)[value % len(harness.clients)]
            aborted.add(request_id)
            harness.abort(request_id)
        case "crash_worker":
            harness.crash_worker()
        case "crash_engine":
            harness.crash_engine()

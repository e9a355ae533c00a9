"""Random traffic over random pools: whatever happens, clients get the tokens of an undisturbed run, once and in order,
and between any two events the engine's books are right."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.sim.hash_worker import expected_output
from tests.engine.harness import Harness
from tests.engine.traffic import CALM, PROMPTS, REQUESTS, ROUGH, SHAPES, Action, Actor


def examples(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )


def act_out(shape: dict, actions: list[Action]) -> Harness:
    harness = Harness(**shape)
    actor = Actor(harness)
    for action in actions:
        actor.act(action)
        harness.check()
    _finish(harness)
    actor.check_clients()
    return harness


def _finish(harness: Harness) -> None:
    """Steps in flight until nothing is left, looking at the books all the way."""
    harness.start_worker()
    for _ in range(5000):
        while harness.plan() is not None:
            pass
        harness.check()
        if not harness.plans:
            break
        harness.answer()
        harness.check()
    assert harness.core.idle, "unfinished requests have a step planned"
    harness.core.audit_idle()


@examples(250)
@given(SHAPES, st.lists(ROUGH, min_size=20, max_size=80))
def test_every_client_gets_exactly_its_tokens_whatever_happens(shape: dict, actions: list) -> None:
    """Few examples: the thousand simulated runs of tests/sim/test_seeds.py check the same, with all other processes."""
    act_out(shape, actions)


@pytest.mark.full
@examples(1000)
@given(SHAPES, st.lists(ROUGH, min_size=20, max_size=80))
def test_every_client_gets_exactly_its_tokens_in_a_thousand_examples(shape: dict, actions: list) -> None:
    act_out(shape, actions)


@examples(100)
@given(
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(16, 20),
            "block_size": st.just(4),
            "max_num_seqs": st.integers(2, 8),
            "max_num_batched_tokens": st.sampled_from([8, 11, 32]),
            "output_caching": st.booleans(),
            "num_draft_tokens": st.sampled_from([0, 4]),
        }
    ),
    st.lists(CALM, min_size=12, max_size=50),
)
def test_a_pool_that_is_too_small_costs_time_and_no_token(shape: dict, actions: list) -> None:
    harness = act_out(shape, actions)
    assert all(
        client.error_code in (None, "deadline_exceeded") for client in harness.clients.values() if client.accepted
    )


@examples(100)
@given(SHAPES, st.lists(REQUESTS, min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=40))
def test_results_that_come_late_change_nothing(shape: dict, requests: list, delays: list) -> None:
    """All are submitted at once; then each result is held back by so many attempts to plan."""
    harness = Harness(**shape)
    actor = Actor(harness)
    for request in requests:
        actor.act(("submit", request))
    for delay in delays:
        for _ in range(delay):
            harness.plan()
        if harness.plans:
            harness.answer()
        harness.check()
    _finish(harness)
    actor.check_clients()


@examples(300)
@given(REQUESTS, st.integers(0, 30), SHAPES)
def test_a_request_resubmitted_at_any_token_goes_on_as_if_nothing_had_happened(
    request: dict, cut: int, shape: dict
) -> None:
    harness = Harness(**(shape | {"num_blocks": 70, "block_size": 4}))
    actor = Actor(harness)
    actor.act(("submit", request | {"deadline_in_s": None}))
    harness.run_until_idle()
    [first] = harness.clients.values()
    cut = min(cut, len(first.tokens))
    again = harness.submit(
        "again",
        first.submit.prompt_token_ids,
        generated=first.tokens[:cut],
        epoch=2,
        max_tokens=first.submit.sampling_params.max_tokens,
        seed=first.submit.sampling_params.seed,
        temperature=first.submit.sampling_params.temperature,
        end=first.submit.sampling_params.end_token_ids,
        min_tokens=first.submit.sampling_params.min_tokens,
    )
    harness.run_until_idle()
    assert (again.tokens, again.finish_reason) == (first.tokens, first.finish_reason)


@examples(100)
@given(PROMPTS, st.integers(1, 40), st.integers(0, 3))
def test_the_reference_is_what_a_worker_alone_with_a_request_computes(prompt: list, max_tokens: int, seed: int) -> None:
    harness = Harness(max_num_seqs=1, prefix_caching=False)
    client = harness.submit("a", prompt, max_tokens=max_tokens, seed=seed, temperature=float(seed > 0))
    harness.run_until_idle()
    assert client.tokens == expected_output(prompt, client.submit.sampling_params, max_tokens, harness.vocab_size)

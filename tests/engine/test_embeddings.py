"""Requests that want a vector of their prompt, among others: never of a part of it, and whatever happens meanwhile."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.handoff import PrefillRequest
from onward.proto.sampling_params import Pooling
from tests.engine.harness import Harness
from tests.engine.pd_cluster import Cluster

POOLINGS: list[Pooling] = ["mean", "last"]
PROMPT = list(range(1, 40))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_is_of_the_whole_prompt_and_ends_the_request(pooling: Pooling) -> None:
    harness = Harness(max_num_batched_tokens=8)
    client = harness.submit("a", PROMPT, pooling=pooling, max_tokens=None)
    harness.run_until_idle()
    assert client.embedding == harness.expected_vector(client)
    assert (client.finish_reason, client.tokens) == ("stop", [])
    harness.core.audit_idle()


@pytest.mark.parametrize(("pooling", "num_cached"), [("mean", 0), ("last", 36)])
def test_only_a_mean_needs_rows_that_are_in_the_cache(pooling: Pooling, num_cached: int) -> None:
    harness = Harness()
    harness.submit("before", PROMPT, max_tokens=1)
    harness.run_until_idle()
    client = harness.submit("a", PROMPT, pooling=pooling)
    harness.run_until_idle()
    assert (client.embedding, client.cached) == (harness.expected_vector(client), num_cached)


def test_a_mean_takes_no_more_steps_than_the_prompt_does() -> None:
    """Unlike logprobs of a prompt, of which a step has few rows: a mean needs no logits."""
    harness = Harness(max_num_batched_tokens=256)
    clients = [harness.submit(f"r{i}", [i, *range(99)], pooling="mean") for i in range(2)]
    harness.run_until_idle()
    assert len(harness.all_plans) == 1
    assert [client.embedding for client in clients] == [harness.expected_vector(client) for client in clients]


def test_what_was_computed_for_a_vector_is_in_the_cache_for_all() -> None:
    harness = Harness()
    harness.submit("before", PROMPT, pooling="mean")
    harness.run_until_idle()
    client = harness.submit("a", PROMPT, max_tokens=4)
    harness.run_until_idle()
    assert (client.tokens, client.cached) == (harness.expected(client), 36)


def test_a_prompt_may_fill_the_whole_context() -> None:
    harness = Harness(max_model_len=40)
    client = harness.submit("a", list(range(40)), pooling="mean", max_tokens=None)
    longer = harness.submit("b", list(range(41)), pooling="mean", max_tokens=None)
    harness.run_until_idle()
    assert client.embedding == harness.expected_vector(client)
    assert longer.error_code == "context_length_exceeded"


@settings(deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["mean", "last", None])), min_size=1, max_size=8),
    crashes=st.lists(st.sampled_from(["answer", "answer", "worker", "engine"]), max_size=12),
)
def test_whatever_happens_each_gets_its_vector_or_its_tokens(
    prompts: list[tuple[int, Pooling | None]], crashes: list[str]
) -> None:
    harness = Harness(num_blocks=12, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    for index, (length, pooling) in enumerate(prompts):
        harness.submit(f"r{index}", [index % 3 + 1] * length, pooling=pooling, max_tokens=6, temperature=1.0)
    for what in crashes:
        while harness.plan() is not None:
            pass
        if what == "worker":
            harness.crash_worker()
        elif what == "engine":
            harness.crash_engine()
        elif harness.plans:
            harness.answer()
        harness.check()
    harness.run_until_idle()
    for client in harness.clients.values():
        wants_vector = client.submit.sampling_params.pooling is not None
        if client.error_code == "crashed_worker":
            continue
        assert client.embedding == (harness.expected_vector(client) if wants_vector else None)
        assert client.tokens == ([] if wants_vector else harness.expected(client))


@pytest.mark.parametrize("local_prefill", [True, False])
def test_a_decode_instance_makes_vectors_itself_whatever_it_may_prefill(local_prefill: bool) -> None:
    """A peer would compute the prompt, and have nothing to hand over."""
    cluster = Cluster(local_prefill=local_prefill)
    client = cluster.submit("a", PROMPT, pooling="mean")
    cluster.settle()
    assert client.embedding == cluster.decode.expected_vector(client)
    assert not [message for message in cluster.seen if isinstance(message, PrefillRequest)]
    cluster.check_idle()

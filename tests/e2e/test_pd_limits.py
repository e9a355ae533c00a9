"""Prefill and decode apart, at their limits: no peer and no leave to do it alone, too few blocks, a writer gone silent."""

from typing import Any

import httpx
import pytest

from tests.e2e.pd_instances import (
    SMALL,
    Pair,
    ended,
    handovers,
    kill_instance,
    num_steps,
    run_disturbed,
    total,
    wait_for,
    wait_until_at_rest,
)
from tests.e2e.server import Server
from tests.e2e.streams import TOPICS, chat_body, run_streams

NUM_BLOCKS = 24


def long_chat(index: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A prompt of about 900 tokens."""
    words = " and ".join(f"{TOPICS[(index + i) % len(TOPICS)]} {i}" for i in range(230))
    return chat_body(index, max_tokens, messages=[{"role": "user", "content": f"{index}: {words}"}], **more)


def chat(server: Server, salt: str) -> tuple[int, dict[str, Any]]:
    return server.post("/v1/chat/completions", long_chat(1, 8, cache_salt=salt))


def test_without_a_peer_and_without_leave_to_prefill_a_request_is_told_to_come_back() -> None:
    decode = ("--no-local-prefill", "--local-prefill-tokens", "0")
    with Pair("--lease-s", "2", "--handover-timeout-s", "6", decode=decode) as pair:
        expected = chat(pair.decode, "first")[1]["choices"]

        def disturb() -> None:
            wait_for(lambda: handovers(pair.decode, "decode", "granted"), "a grant")
            kill_instance(pair.prefill)

        under_way = run_disturbed(pair.decode.url, [long_chat(1, 8, cache_salt="second")] * 2, disturb)
        status, answer = chat(pair.decode, "third")
        for error in [*(stream.error for stream in under_way), answer["error"]]:
            assert error is not None
            assert (error["code"], error["retryable"]) == ("pd_prefill_failed", True)
        assert status == 503
        assert pair.decode.get("/health")["status"] == "ok", "health is about oneself"
        pair.start_prefill()
        wait_for(lambda: chat(pair.decode, "fourth")[0] == 200, "an answer")
        assert chat(pair.decode, "fifth")[1]["choices"] == expected
        pair.wait_until_at_rest()


@pytest.mark.full
def test_streams_that_cannot_go_on_here_are_continued_from_what_they_were_told() -> None:
    """The pool is too small for all, the peer that could compute the preempted ones again is dead."""
    bodies = [chat_body(i, 80) for i in range(8)]
    with Server(*SMALL) as mixed:
        expected = [stream.result() for stream in run_streams(mixed.url, bodies)]
    decode = ("--no-local-prefill", "--local-prefill-tokens", "0", "--num-kv-blocks", str(NUM_BLOCKS))
    with Pair("--lease-s", "2", "--handover-timeout-s", "4", decode=decode) as pair:

        def disturb() -> None:
            wait_for(lambda: pair.decode.metrics()['onward_requests{state="running"}'] >= 4, "four streams")
            kill_instance(pair.prefill)

        told = run_disturbed(pair.decode.url, bodies, disturb)
        given_up = [stream for stream in told if stream.finish_reasons == ["pd_reschedule"]]
        assert given_up
        assert all(stream.resume is not None for stream in given_up)
        pair.start_prefill()
        wait_for(lambda: pair.decode.post("/v1/chat/completions", chat_body(9, 1))[0] == 200, "an answer")
        for stream, whole in zip(told, expected, strict=True):
            parts = [stream]
            while parts[-1].finish_reasons != ["length"]:
                assert len(parts) < 10
                parts += run_streams(pair.decode.url, [stream.body | (parts[-1].resume or {})])
            text, token_ids, _, completion_tokens = parts[-1].result()
            assert ("".join(part.text for part in parts[:-1]) + text, token_ids, ["length"], completion_tokens) == whole
        pair.wait_until_at_rest()


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--no-local-prefill",), marks=pytest.mark.full)], ids=["at home", "at the peer"]
)
def test_preempted_streams_equal_those_of_a_big_pool(more: tuple[str, ...]) -> None:
    bodies = [chat_body(i, 80) for i in range(16)]
    with Server(*SMALL) as mixed:
        expected = [stream.result() for stream in run_streams(mixed.url, bodies)]
    decode = ("--local-prefill-tokens", "0", "--num-kv-blocks", str(NUM_BLOCKS), *more)
    with Pair(decode=decode) as pair:
        streams = run_streams(pair.decode.url, bodies)
        assert [stream.result() for stream in streams] == expected
        assert pair.decode.metrics()["onward_preemptions_total"] >= 5
        assert ended(pair.decode, "arrived") >= len(bodies)
        pair.wait_until_at_rest()


@pytest.mark.full
@pytest.mark.parametrize("stopped", ["worker", "instance"])
def test_blocks_that_a_silent_writer_may_still_write_are_given_up_in_the_end(stopped: str) -> None:
    """The production bound is half a minute; then the decode worker is renewed, and its memory with it."""
    body = long_chat(2, 12)
    with Server(*SMALL) as mixed:
        [expected] = run_streams(mixed.url, [body])
    decode = ("--local-prefill-tokens", "0", "--kv-backend", "shm")
    with Pair("--lease-s", "2", "--handover-timeout-s", "6", decode=decode) as pair:

        def disturb() -> None:
            before = num_steps(pair.prefill)
            wait_for(lambda: num_steps(pair.prefill) > before, "a step")
            pids = pair.prefill.pids() if stopped == "instance" else [pair.prefill.pid("worker")]
            pair.pause(pids)

        [stream] = run_disturbed(pair.decode.url, [body], disturb)
        assert stream.result() == expected.result()
        assert pair.decode.metrics()['onward_kv_blocks{state="quarantined"}'] > 0
        assert pair.decode.get("/health")["status"] == "ok"
        [stream] = run_streams(pair.decode.url, [body])
        assert stream.result() == expected.result(), "there is room for others meanwhile"
        wait_for(lambda: pair.decode.get("/info")["restarts"]["worker"], "a renewed worker", patience_s=60)
        wait_for(lambda: pair.decode.metrics()['onward_kv_blocks{state="quarantined"}'] == 0, "no quarantine")
        [stream] = run_streams(pair.decode.url, [body])
        assert stream.result() == expected.result()
        pair.resume()
        pair.wait_until_at_rest()
        [stream] = run_streams(pair.decode.url, [body | {"cache_salt": "last"}])
        assert stream.result() == expected.result()
        pair.wait_until_at_rest()


@pytest.mark.full
def test_a_pool_that_is_mostly_in_a_silent_writers_hands_is_renewed_at_once() -> None:
    bodies = [long_chat(i, 8) for i in range(3)]
    with Server(*SMALL) as mixed:
        expected = [stream.result() for stream in run_streams(mixed.url, bodies)]
    decode = ("--local-prefill-tokens", "0", "--kv-backend", "shm", "--num-kv-blocks", "200")
    with Pair("--lease-s", "2", decode=decode) as pair:

        def disturb() -> None:
            wait_for(lambda: handovers(pair.decode, "decode", "granted"), "a grant")
            pair.pause(pair.prefill.pids())

        streams = run_disturbed(pair.decode.url, bodies, disturb)
        assert [stream.result() for stream in streams] == expected
        wait_for(lambda: pair.decode.get("/info")["restarts"]["worker"], "a renewed worker", patience_s=20)
        pair.resume()
        pair.wait_until_at_rest()


@pytest.mark.full
def test_the_next_peer_takes_over_from_one_that_dies() -> None:
    bodies = [long_chat(i, 12) for i in range(6)]
    with Server(*SMALL) as mixed:
        expected = [stream.result() for stream in run_streams(mixed.url, bodies)]
    small = (*SMALL, "--num-kv-blocks", "512")
    with Server(*small, "--role", "prefill") as first, Server(*small, "--role", "prefill") as second:
        peers = ",".join(peer.get("/info")["configuration"]["handoff_address"] for peer in (first, second))
        with Server(*small, "--role", "decode", "--prefill-peers", peers, "--no-local-prefill") as decode:

            def disturb() -> None:
                wait_for(lambda: handovers(first, "prefill", "granted"), "a grant to the first")
                kill_instance(first)

            streams = run_disturbed(decode.url, bodies, disturb)
            assert [stream.result() for stream in streams] == expected
            assert decode.metrics()['onward_pd_prefill_fallbacks_total{to="peer"}'] >= 1
            wait_until_at_rest(decode)
            wait_until_at_rest(second)


@pytest.mark.full
def test_one_peer_works_for_two_decode_instances_and_outlives_either() -> None:
    bodies = [long_chat(i, 12) for i in range(4)]
    with Server(*SMALL) as mixed:
        expected = [stream.result() for stream in run_streams(mixed.url, bodies)]
    with Pair("--lease-s", "2") as pair:
        peer = pair.prefill.get("/info")["configuration"]["handoff_address"]
        flags = (*SMALL, "--role", "decode", "--prefill-peers", peer, "--kv-backend", "tcp")
        with Server(*flags) as other:

            def disturb() -> None:
                with pytest.raises(httpx.TransportError):
                    run_disturbed(other.url, bodies, kill_other)

            def kill_other() -> None:
                wait_for(lambda: handovers(other, "decode", "granted"), "a grant of the other")
                kill_instance(other)

            streams = run_disturbed(pair.decode.url, bodies, disturb)
            assert [stream.result() for stream in streams] == expected
            assert total(pair.decode, "onward_pd_prefill_fallbacks_total") == 0
            pair.wait_until_at_rest()

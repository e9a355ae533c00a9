"""A worker of several ranks: it is one incarnation, and its streams survive the end of any rank."""

import os
import random
import select
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.adoption import NewServer
from tests.e2e.cluster import Port
from tests.e2e.pd_instances import EVERYTHING_IS_HANDED_OVER, Pair, ended, wait_for
from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

NUM_RANKS = 3
FLAGS = ("--threads", "1", "--max-num-seqs", "16", "--num-kv-blocks", "400", "--stopped-timeout-s", "1")


def rank_pids(server: Server) -> dict[int, int]:
    """The process of each rank that serves."""
    return {
        one["rank"]: one["pid"] for one in server.get("/info")["processes"] if one["role"] in ("worker", "worker_rank")
    }


class SignalRanks:
    """Sends signals to ranks, each when all streams have had so many more tokens."""

    def __init__(
        self, server: Server, faults: list[tuple[int, signal.Signals]], every: int, num_ranks: int = NUM_RANKS
    ) -> None:
        self._server, self._faults, self._every, self._num_ranks = server, list(faults), every, num_ranks
        self._next_at = every
        self.groups: list[frozenset[int]] = []
        """The processes of each group that was disturbed."""

    def __call__(self, streams: list[Stream]) -> None:
        if not self._faults or sum(len(stream.token_ids) for stream in streams) < self._next_at * len(streams):
            return
        pids = rank_pids(self._server)
        group = frozenset(pids.values())
        if len(group) < self._num_ranks or any(group & earlier for earlier in self.groups):
            return  # the group that was disturbed last is still there
        rank, number = self._faults.pop(0)
        self._next_at += self._every
        self.groups.append(group)
        os.kill(pids[rank], number)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--tensor-parallel", str(NUM_RANKS), *FLAGS) as server:
        yield server


def test_the_ranks_are_listed_and_are_one_incarnation(server: Server) -> None:
    info = server.get("/info")
    ranks = [one for one in info["processes"] if "rank" in one]
    assert [(one["role"], one["rank"]) for one in ranks] == [("worker", 0), ("worker_rank", 1), ("worker_rank", 2)]
    assert len({one["incarnation"] for one in ranks}) == 1
    assert info["pids"]["worker"] + info["pids"]["worker_rank"] == [one["pid"] for one in ranks]
    assert info["configuration"]["tensor_parallel"] == NUM_RANKS
    assert server.metrics()['onward_process_cpu_seconds_total{process="worker_rank"}'] > 0


def test_streams_continue_when_a_rank_is_killed_and_when_one_is_stopped(server: Server) -> None:
    bodies = [chat_body(index, 40) for index in range(4)]
    undisturbed = [stream.result() for stream in run_streams(server.url, bodies)]
    restarts = server.get("/info")["restarts"]["worker"]
    faults = SignalRanks(server, [(1, signal.SIGKILL), (2, signal.SIGSTOP)], every=10)
    streams = run_streams(server.url, bodies, faults)
    assert [stream.result() for stream in streams] == undisturbed
    assert len(faults.groups) == 2, "both were disturbed before the streams had ended"
    # A stopped rank that holds no part of a step delays nothing, so the streams may end before it is replaced.
    wait_for(lambda: server.get("/info")["restarts"]["worker"] == restarts + 2, "the group that replaces it")
    wait_for(lambda: len(rank_pids(server)) == NUM_RANKS, "all of its ranks")
    assert not frozenset(rank_pids(server).values()) & frozenset.union(*faults.groups), "no rank outlives its group"
    assert "rank 1: signal 9" in server.log() and "stopped by a signal" in server.log()
    assert server.metrics()['onward_recomputed_tokens_total{cause="worker"}'] <= 2 * 2 * len(bodies), "KV is kept"


@pytest.mark.full
def test_ten_faults_of_random_ranks_under_sixteen_streams_change_no_token(server: Server) -> None:
    bodies = [chat_body(index, 150) for index in range(16)]
    with Server("--threads", "2", *FLAGS) as one_rank:
        undisturbed = [stream.result() for stream in run_streams(one_rank.url, bodies)]
    rng = random.Random(7)
    numbers = [signal.SIGKILL, signal.SIGSTOP] * 5
    faults = SignalRanks(server, [(rng.randrange(NUM_RANKS), number) for number in numbers], every=12)
    streams = run_streams(server.url, bodies, faults)
    assert len(faults.groups) == len(numbers)
    assert [stream.result() for stream in streams] == undisturbed


class HangRank:
    """Stops a process for good in the middle of a step. As long as tokens come, it was not in a step: then it is continued
    and stopped again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.is_gone = False

    def __call__(self, streams: list[Stream]) -> None:
        if not self.is_gone and min(len(stream.token_ids) for stream in streams) >= 5:
            try:
                os.kill(self._pid, signal.SIGCONT)
                os.kill(self._pid, signal.SIGSTOP)
            except ProcessLookupError:
                self.is_gone = True


@pytest.mark.full
def test_a_rank_that_hangs_in_a_step_ends_its_group_after_the_stall_timeout() -> None:
    bodies = [chat_body(index, 100) for index in range(4)]
    flags = (*FLAGS[:-2], "--stopped-timeout-s", "120", "--stall-timeout-s", "3")
    with Server("--tensor-parallel", "2", *flags) as server:
        undisturbed = [stream.result() for stream in run_streams(server.url, bodies)]
        hang = HangRank(rank_pids(server)[1])
        streams = run_streams(server.url, bodies, hang)
        assert hang.is_gone
        assert [stream.result() for stream in streams] == undisturbed
        assert server.get("/info")["restarts"]["worker"] == 1


@pytest.mark.full
def test_no_rank_outlives_a_killed_supervisor() -> None:
    with Server("--tensor-parallel", "2", *FLAGS) as server:
        pidfds = [os.pidfd_open(pid) for pid in rank_pids(server).values()]
        assert len(pidfds) == 2
        server.stop(signal.SIGKILL)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 20)[0], "a rank is still there"
            os.close(pidfd)


@pytest.mark.full
def test_a_standby_of_several_ranks_takes_over_when_a_rank_is_killed() -> None:
    bodies = [chat_body(index, 80) for index in range(4)]
    with Server("--tensor-parallel", "2", *FLAGS, "--standby-worker", "on") as server:
        undisturbed = [stream.result() for stream in run_streams(server.url, bodies)]

        def ready_standby() -> list[int]:
            processes = server.get("/info")["processes"]
            return [one["pid"] for one in processes if "standby" in one["role"] and one["state"] == "ready"]

        standby = wait_for(ready_standby, "a standby")
        assert len(standby) == 2
        faults = SignalRanks(server, [(1, signal.SIGKILL)], every=10, num_ranks=2)
        streams = run_streams(server.url, bodies, faults)
        assert [stream.result() for stream in streams] == undisturbed
        assert list(rank_pids(server).values()) == standby


@pytest.mark.full
def test_a_prompt_computed_by_two_ranks_is_continued_by_three() -> None:
    bodies = [chat_body(index, 30, cache_salt=f"handoff {index}") for index in range(6)]
    with Server("--threads", "2", *FLAGS) as one_rank:
        expected = [stream.result() for stream in run_streams(one_rank.url, bodies)]
    decode = (*EVERYTHING_IS_HANDED_OVER, "--tensor-parallel", "3")
    with Pair(prefill=("--tensor-parallel", "2"), decode=decode) as pair:
        streams = run_streams(pair.decode.url, bodies)
        assert [stream.result() for stream in streams] == expected
        assert ended(pair.decode, "arrived") == len(bodies)


@pytest.mark.full
def test_a_server_adopts_the_memory_of_one_with_another_number_of_ranks() -> None:
    body = chat_body(1, 12)
    body["messages"] = [{"role": "user", "content": " ".join(f"word{number}" for number in range(60))}]
    port = Port()
    with Server(*port.flags, *FLAGS, "--log-level", "info") as old:
        [before] = run_streams(old.url, [body])
        with NewServer(port, *FLAGS, "--standby-worker", "off", "--tensor-parallel", "2") as new:
            new.wait_until_ready()
            new.wait_for_line("cached blocks adopted")
            [after] = run_streams(new.url, [body])
            assert after.result() == before.result()
            assert after.usage is not None
            assert after.usage["prompt_tokens_details"]["cached_tokens"] > 0
    port.close()


def test_a_number_of_ranks_that_does_not_fit_the_model_is_refused_by_the_flag(server: Server) -> None:
    with pytest.raises(AssertionError, match=r"--tensor-parallel 19: .* at most 18 ranks"):
        Server("--tensor-parallel", "19")

"""The lines of `benchmarks.gpu.exactness`: each computes the streams of a base run in another way and compares them.

A line also says what shows that the streams were computed in that way, and fails if nothing shows it.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.exactness_requests import EMBEDDINGS, Requests
from benchmarks.gpu.stream_client import CompletionsClient, read_all, read_into
from benchmarks.gpu.stream_outputs import ComparisonResult, RepeatedStream, StreamOutput, line_result
from benchmarks.harness.serving import ServeProcess

BLOCK_SIZE = 16
NUM_ALONE = 8
BATCH_SIZE = 64
NUM_RESUMED = 6
RESUME_EVERY = 10
_PREEMPTIONS = "onward_preemptions_total"
_ABORTED = 'onward_requests_finished_total{reason="abort"}'


@dataclass(slots=True)
class ComparisonRun:
    """The streams of one kind at one server, and what the base run gave."""

    requests: Requests
    kind: str
    server: ServeProcess
    client: CompletionsClient
    base: list[StreamOutput]

    def salt(self, line: str) -> str:
        return f"{self.kind} {line}"

    def bodies(self, line: str, count: int | None = None) -> list[dict[str, Any]]:
        """The first `count` of the compared streams, or all. Those of another line share no cached block with them."""
        numbers = range(self.requests.num_streams if count is None else min(count, self.requests.num_streams))
        return [self.requests.stream(number, self.kind, self.salt(line)) for number in numbers]

    async def metric(self, name: str) -> float:
        return await asyncio.to_thread(self.server.metric, name)

    async def info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.server.info)

    def result(
        self, title: str, outputs: Sequence[StreamOutput], evidence: str = "", problem: str | None = None
    ) -> ComparisonResult:
        return line_result(
            title, self.base, [RepeatedStream(i, one) for i, one in enumerate(outputs)], evidence, problem
        )


async def compute_base(run: ComparisonRun) -> ComparisonResult:
    """Reads the base run, and checks that there is something to compare."""
    bodies = run.bodies("base")
    run.base = await read_all(run.client, bodies)
    num_tokens = run.requests.num_tokens
    short = sum(len(one.token_ids) != num_tokens for one in run.base)
    asked = [one for body, one in zip(bodies, run.base, strict=True) if "logprobs" in body]
    unscored = sum(len(one.logprobs) != num_tokens for one in asked)
    distinct = len({tuple(one.token_ids) for one in run.base})
    evidence = f"{distinct} distinct outputs, {len(set(run.base[0].token_ids))} distinct tokens in the first"
    problem = None
    if short or unscored or distinct < len(run.base):
        problem = f"{short} streams are too short, {unscored} have no logprobs, {len(run.base) - distinct} are copies"
    return run.result("base run", run.base, evidence, problem)


async def run_cached(run: ComparisonRun) -> ComparisonResult:
    outputs = await read_all(run.client, run.bodies("base"))
    uncached = sum(not one.num_cached for one in outputs)
    evidence = f"{sum(one.num_cached or 0 for one in outputs)} prompt tokens from the cache"
    problem = f"{uncached} streams found nothing in the prefix cache" if uncached else None
    return run.result("repeated with the same salt, prefix cached", outputs, evidence, problem)


async def run_anew(run: ComparisonRun) -> ComparisonResult:
    outputs = await read_all(run.client, run.bodies("anew"))
    cached = sum(bool(one.num_cached) for one in outputs)
    problem = f"{cached} streams found something in the prefix cache" if cached else None
    return run.result("repeated with another salt, all computed anew", outputs, "", problem)


async def run_alone(run: ComparisonRun) -> ComparisonResult:
    outputs = [(await read_all(run.client, [body]))[0] for body in run.bodies("alone", NUM_ALONE)]
    return run.result("each alone, one after another", outputs)


async def run_in_batch(run: ComparisonRun) -> ComparisonResult:
    bodies = run.bodies("batch", NUM_ALONE)
    strangers = [run.requests.stranger(i, run.salt("batch")) for i in range(BATCH_SIZE - len(bodies))]
    outputs = await read_all(run.client, [*strangers, *bodies])
    return run.result(f"in a batch of {BATCH_SIZE}, among other prompts", outputs[len(strangers) :])


async def run_resumed(run: ComparisonRun) -> ComparisonResult:
    """Half of the resumed streams find the base run's blocks in the cache, half compute prompt and output anew. Logprobs
    of the given tokens are asked for again: computed as a prompt, they must equal those of decoding."""
    cuts = list(range(RESUME_EVERY, run.requests.num_tokens, RESUME_EVERY))
    bodies, repeats = [], []
    for number, body in enumerate(run.bodies("base", NUM_RESUMED)):
        for turn, cut in enumerate(cuts):
            given = run.base[number].token_ids[:cut]
            salt = {"cache_salt": run.salt(f"resumed at {cut}")} if turn % 2 else {}
            rescored = {"rescore_from": 0} if "logprobs" in body else {}
            bodies.append(body | salt | rescored | {"generated_token_ids": given})
            repeats.append(RepeatedStream(number, StreamOutput(given), f"resumed at {cut}"))
    await read_into(run.client, bodies, [repeat.output for repeat in repeats])
    title = f"resumed at every {RESUME_EVERY}th token by generated_token_ids"
    return line_result(title, run.base, repeats, f"{len(repeats)} resumed streams")


async def run_reconnected(run: ComparisonRun) -> ComparisonResult:
    """Comes back in three ways in turn: by GET; by POST with the same body; and by POST as if to a server that has lost the
    stream, which makes it again from its seed."""
    bodies = run.bodies("reconnected")
    outputs = [StreamOutput() for _ in bodies]
    before = await run.metric(_ABORTED)

    async def cut_and_read_on(number: int) -> None:
        body, output = bodies[number], outputs[number]
        cut = 1 + number * (run.requests.num_tokens * 3 // 4) // len(bodies)
        await run.client.read_and_cut(body, output, cut)
        version, request_id, rest = output.last_id.split(";", 2)
        lost = f"{version};{request_id[::-1]};{rest}"
        await run.client.read_on(None if number % 3 == 0 else body, output, lost if number % 3 == 2 else output.last_id)

    async with asyncio.TaskGroup() as tasks:
        for number in range(len(bodies)):
            tasks.create_task(cut_and_read_on(number))
    num_stopped = int(await run.metric(_ABORTED) - before)
    problem = None if num_stopped else "every stream had ended before its connection was cut"
    title = "cut by the client and resumed by Last-Event-ID"
    return run.result(title, outputs, f"{num_stopped} stopped by the cut", problem)


async def run_killed(run: ComparisonRun, role: str) -> ComparisonResult:
    before = await run.info()
    num_running = 0

    async def kill() -> None:
        # While its worker is stopped, no request can end before the kill, however long `/info` takes.
        nonlocal num_running
        [worker_pid], [pid] = before["pids"]["worker"], before["pids"][role]
        os.kill(worker_pid, signal.SIGSTOP)
        num_running = sum((await run.info())["requests"].values())
        os.kill(pid, signal.SIGKILL)

    outputs = await read_all(run.client, run.bodies(f"{role} killed"), kill)
    after = await run.info()
    num_restarts = after["restarts"][role] - before["restarts"][role]
    problem = None
    if num_restarts != 1 or not num_running:
        problem = f"{num_restarts} restarts, {num_running} requests under way at the kill"
    return run.result(f"{role} killed", outputs, f"{num_running} requests under way at the kill", problem)


async def run_worker_killed(run: ComparisonRun) -> ComparisonResult:
    return await run_killed(run, "worker")


async def run_engine_killed(run: ComparisonRun) -> ComparisonResult:
    return await run_killed(run, "engine")


async def run_preempted(run: ComparisonRun) -> ComparisonResult:
    """Urgent requests first take so many blocks that two thirds of the streams fit beside them, so the pool is full when
    streams grow. More of them come while the streams run, and take half of what the streams have."""
    requests = run.requests
    before = await run.metric(_PREEMPTIONS)
    needed = requests.num_blocks(BLOCK_SIZE)
    left = needed * 2 // 3
    taken = sum((await run.info())["kv_blocks"].values()) - left
    blocks_each = (requests.prompt_len + requests.num_tokens) // BLOCK_SIZE + 1
    num_holding, num_pressing = taken // blocks_each, left // 2 // blocks_each + 1
    holding = [requests.urgent(i, run.salt("urgent"), requests.max_hold) for i in range(num_holding)]
    pressing = [
        requests.urgent(i, run.salt("urgent"), requests.num_tokens)
        for i in range(num_holding, num_holding + num_pressing)
    ]

    async def press() -> None:
        await read_all(run.client, pressing)

    async with asyncio.TaskGroup() as tasks:
        held = [HoldingStream(run.client, body) for body in holding]
        reading = [tasks.create_task(one.read()) for one in held]
        for one in held:
            await one.started.wait()
        outputs = await read_all(run.client, run.bodies("preempted"), press)
        for task in reading:
            task.cancel()
    num_preemptions = int(await run.metric(_PREEMPTIONS) - before)
    problem = None if num_preemptions else "no request was preempted"
    return run.result("preempted by urgent requests", outputs, f"{num_preemptions} preemptions", problem)


class HoldingStream:
    """A stream that is read for the blocks it holds."""

    def __init__(self, client: CompletionsClient, body: dict[str, Any]) -> None:
        self._client, self._body = client, body
        self._output = StreamOutput()
        self.started = asyncio.Event()
        """Set with the first token: its prompt's blocks are allocated."""

    async def read(self) -> None:
        await self._client.read(self._body, self._output, on_event=self._on_event)

    def _on_event(self) -> None:
        if self._output.token_ids:
            self.started.set()


async def run_with_neighbours(run: ComparisonRun) -> ComparisonResult:
    """Requests of every other kind are repeated until the streams have ended."""
    over, num_finished = asyncio.Event(), 0

    async def repeat(send: Callable[[], Awaitable[Any]]) -> None:
        nonlocal num_finished
        while not over.is_set():
            await send()
            num_finished += 1

    async with asyncio.TaskGroup() as tasks:
        for body in run.requests.neighbours(run.salt("neighbours")):
            tasks.create_task(repeat(lambda body=body: run.client.read(body, StreamOutput())))
        embeddings = run.requests.embeddings()
        tasks.create_task(repeat(lambda: run.client.post(EMBEDDINGS, embeddings)))
        outputs = await read_all(run.client, run.bodies("beside"))
        over.set()
    return run.result("beside requests of every kind", outputs, f"{num_finished} requests beside them")


async def run_other_budget(run: ComparisonRun) -> ComparisonResult:
    """The run is at a server of its own."""
    outputs = await read_all(run.client, run.bodies("budget"))
    budget = (await run.info())["configuration"]["max_num_batched_tokens"]
    return run.result(f"at a server with --max-num-batched-tokens {budget}", outputs)


Line = Callable[[ComparisonRun], Awaitable[ComparisonResult]]
LINES: dict[str, Line] = {
    "cached": run_cached,  # first, while the base run's blocks are cached
    "resumed": run_resumed,
    "anew": run_anew,
    "alone": run_alone,
    "batch": run_in_batch,
    "reconnected": run_reconnected,
    "preempted": run_preempted,
    "neighbours": run_with_neighbours,
    "worker-killed": run_worker_killed,
    "engine-killed": run_engine_killed,
    "budget": run_other_budget,
}

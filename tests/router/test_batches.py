"""`/v1/files` and `/v1/batches` of a router: it runs batches over its instances, and keeps them in its own folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from onward.batches.batch_policy import BATCH_PRIORITY
from tests.router.harness import CHAT, Router, running_router
from tests.router.stand_in_instance import StandInInstance

NUM_REQUESTS = 12
POLL_S = 0.05
MAX_POLLS = 1200


def lines(model: str) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 6}
    return b"".join(
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
        for number in range(NUM_REQUESTS)
    )


async def create(router: Router, content: bytes) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="in.jsonl")
    async with router.session.post(f"{router.url}/v1/files", data=form) as response:
        file = await response.json()
        assert response.status == 200, file
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    answer = await router.post(body, path="/v1/batches")
    assert answer.status == 200, answer.json
    return answer.json["id"]


async def ended(router: Router, batch_id: str) -> dict[str, Any]:
    for _ in range(MAX_POLLS):
        batch = (await router.get(f"/v1/batches/{batch_id}")).json
        if batch["status"] in ("completed", "failed"):
            return batch
        await asyncio.sleep(POLL_S)
    raise AssertionError("the batch did not end in time")


async def answered(router: Router, batch: dict[str, Any]) -> set[str]:
    assert batch["status"] == "completed" and batch["error_file_id"] is None, batch
    content = (await router.get(f"/v1/files/{batch['output_file_id']}/content")).body
    ids = [json.loads(line)["custom_id"] for line in content.splitlines()]
    assert len(ids) == len(set(ids))
    return set(ids)


ALL = {f"r{number}" for number in range(NUM_REQUESTS)}


def test_a_batch_runs_over_all_instances_with_a_low_priority(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = StandInInstance("a"), StandInInstance("b")
        async with running_router(first, second, policy="round_robin", batch_dir=str(tmp_path)) as router:
            batch = await ended(router, await create(router, lines(first.model)))
            assert await answered(router, batch) == ALL
            attempts = [*first.attempts, *second.attempts]
            assert first.attempts and second.attempts
            assert {attempt.caller_priority for attempt in attempts} == {BATCH_PRIORITY}
            assert len({attempt.seed for attempt in attempts}) == NUM_REQUESTS

    uvloop.run(scenario())


def test_a_batch_that_is_created_without_an_instance_waits_for_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        async with running_router(batch_dir=str(tmp_path)) as router:
            batch_id = await create(router, lines(instance.model))
        async with running_router(instance, batch_dir=str(tmp_path)) as router:
            assert await answered(router, await ended(router, batch_id)) == ALL

    uvloop.run(scenario())


def test_without_a_folder_the_routes_name_the_flag() -> None:
    async def scenario() -> None:
        async with running_router() as router:
            for path in ("/v1/files", "/v1/batches"):
                answer = await router.get(path)
                assert answer.status == 404 and "--batch-dir" in answer.json["error"]["message"]

    uvloop.run(scenario())


def test_after_a_restart_a_batch_waits_for_a_model_that_registers_later_than_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        early, late = StandInInstance("a", model="early"), StandInInstance("b", model="late")
        async with running_router(early, batch_dir=str(tmp_path)) as router:
            batch_id = await create(router, lines("late"))
            for _ in range(MAX_POLLS):
                if router.metric("requests", CHAT, "404") > 0:
                    break
                await asyncio.sleep(POLL_S)
            await late.start()
            assert (await late.register_once(router.session, router.url)).error == ""
            late.register_with(router.url)
            try:
                assert await answered(router, await ended(router, batch_id)) == ALL
            finally:
                await late.stop()

    uvloop.run(scenario())

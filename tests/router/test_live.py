"""A router's live view: its streams and each instance as it shows itself; and the buttons that drain one."""

import asyncio
import json
from typing import Any

import uvloop

from onward.web.ui.demo_guard import DEMO_PATHS
from onward.web.ui.live_feed import LIVE_PATH, SNAPSHOT_PATH
from tests.router.harness import running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance

CHAT = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 6, "stream": True}
HOSTILE = "<script>alert(1)</script>"


def shown_by(instance: StandInInstance) -> tuple[int, bytes]:
    engine = {"step": 3, "requests": []}
    described = {
        "id": instance.name,
        "role": "mixed",
        "state": "ready",
        "processes": [],
        "restarts": {},
        "engine": engine,
    }
    return 200, json.dumps({"instances": [described]}).encode()


def test_streams_and_instances_are_shown_and_an_instance_that_says_nonsense_is_shown_without_details() -> None:
    async def scenario() -> None:
        good, odd = StandInInstance("good"), StandInInstance("odd")
        good.answers[SNAPSHOT_PATH] = 200, b""
        odd.answers[SNAPSHOT_PATH] = 200, b'{"instances": [1, 2]}'
        gate = asyncio.Event()
        for one in (good, odd):
            one.behave = lambda attempt, number: Behaviour(silent_after=2, gate=gate)
        async with running_router(good, odd) as router:
            good.answers[SNAPSHOT_PATH] = shown_by(good)
            headers = {"x-request-id": HOSTILE}
            async with router.session.post(router.url + "/v1/chat/completions", json=CHAT, headers=headers) as stream:
                await stream.content.readuntil(b"\n\n")
                look: dict[str, Any] = (await router.get(SNAPSHOT_PATH)).json
                gate.set()
                await stream.read()
            assert look["role"] == "router" and look["num_streams"] == 1
            [shown] = look["streams"]
            assert shown["label"] == HOSTILE, "as it is: pages show it as text"
            assert (shown["attempt"], shown["is_paused"]) == (1, False)
            by_id = {one["id"]: one for one in look["instances"]}
            assert shown["instance"] in by_id
            assert by_id["good"]["engine"]["step"] == 3 and by_id["good"]["state"] == "ready"
            assert "engine" not in by_id["odd"]
            async with router.session.get(router.url + LIVE_PATH) as live:
                assert live.headers["content-type"].startswith("text/event-stream")
                event = await live.content.readuntil(b"\n\n")
            assert json.loads(event.removeprefix(b"data: "))["role"] == "router"

    uvloop.run(scenario())


def test_the_drain_button_reaches_the_instance_that_it_names_and_no_other() -> None:
    async def scenario() -> None:
        one, other = StandInInstance("one"), StandInInstance("other")
        one.answers["/drain"] = other.answers["/drain"] = (200, b'{"status":"draining"}')
        async with running_router(one, other) as router:
            answer = await router.post({"instance": "one"}, path="/ui/drain")
            assert (answer.status, answer.json) == (200, {"status": "draining"})
            assert "/drain" in one.paths and "/drain" not in other.paths
            unknown = await router.post({"instance": "nowhere"}, path="/ui/drain")
            assert (unknown.status, unknown.json["error"]["param"]) == (404, "instance")
            wrong = await router.post({"instance": 5}, path="/ui/undrain")
            assert (wrong.status, wrong.json["error"]["param"]) == (400, "instance")

    uvloop.run(scenario())


def test_a_kill_button_reaches_the_instance_from_our_own_page_only() -> None:
    async def scenario() -> None:
        one, path = StandInInstance("one"), DEMO_PATHS["worker"]
        one.answers[path] = 200, b'{"status":"killing"}'
        async with running_router(one, demo=True, api_key=("admin-key",)) as router:
            key = {"authorization": "Bearer admin-key"}
            body = {"instance": "one"}
            for headers, status in (
                ({"origin": router.url}, 401),
                (key, 403),
                (key | {"origin": "https://attacker.example"}, 403),
            ):
                assert (await router.post(body, path=path, headers=headers)).status == status
            assert path not in one.paths
            assert (await router.post(body, path=path, headers=key | {"origin": router.url})).status == 200
            assert path in one.paths
        async with running_router(StandInInstance("other")) as router:
            assert (await router.post(body, path=path, headers={"origin": router.url})).status == 404

    uvloop.run(scenario())

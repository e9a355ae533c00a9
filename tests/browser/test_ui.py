"""The pages of `/ui` in a real Chromium, in front of a real router and two instances: type, reload, kill, drain, read."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.browser.chromium import running_chromium, until
from tests.browser.hostile_strings import COUNT, hostile_strings

KEY = "ow-an-admin-of-the-demo"
MODEL = "smollm2-135m-instruct"
FLAGS = ("--mixed", "2", "--threads", "1", "--num-kv-blocks", "160", "--max-model-len", "1024", "--max-num-seqs", "8")
TRACED = ("--otlp-endpoint", "http://127.0.0.1:9", "--trace-url", "http://traces.test/{trace_id}")
"""No collector is there; the page shows traces all the same."""
START_TIMEOUT_S = 240
QUESTION = "Tell me a long story about a lighthouse keeper."
ANSWER = ".assistant .answer"


class DemoCluster:
    """`onward up --demo`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onward-ui-")
        key_file = Path(self._folder.name) / "key"
        key_file.write_text(KEY)
        key_file.chmod(0o600)
        self._log = (Path(self._folder.name) / "log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "onward.cli.main",
                "up",
                "--demo",
                "--port",
                "0",
                *FLAGS,
                *TRACED,
                # A standby worker takes over too fast for a pause that a person sees.
                "--standby-worker",
                "off",
                "--api-key-file",
                key_file,
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"TMPDIR": self._folder.name, "COLUMNS": "200"},
            text=True,
        )
        self.url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if found := re.search(r"curl (http://[^/]+)/v1", line):
                    return found.group(1)
        finally:
            watchdog.cancel()
        raise AssertionError("the cluster did not start:\n" + Path(self._log.name).read_text())

    def post(self, path: str, body: Any, **headers: str) -> Any:
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | headers
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, json.dumps(body).encode(), sent), timeout=300
        ) as response:
            return json.load(response)

    def snapshot(self) -> Any:
        request = urllib.request.Request(self.url + "/ui/snapshot", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()


@pytest.fixture(scope="module")
def cluster() -> Iterator[DemoCluster]:
    cluster = DemoCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, cluster: DemoCluster) -> Iterator[Page]:
    """A tab that has entered its key. Nothing may have been reported to its console."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(cluster.url + "/")
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.wait_for_selector("#prompt")
    yield page
    context.close()


def ask(page: Page, max_tokens: int = 200, seed: int = 7) -> None:
    is_phone = not page.is_visible("input[name=seed]")
    if is_phone:
        page.click("details.side.right > summary")
    for name, value in {"max_tokens": max_tokens, "seed": seed}.items():
        page.fill(f"input[name={name}]", str(value))
    if is_phone:
        page.click("details.side.right > summary")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")


def answer_of(page: Page) -> str:
    """Without the marks."""
    return page.locator(ANSWER).last.evaluate(
        "(answer) => [...answer.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)"
        ".map((node) => node.data).join('')"
    )


def marks(page: Page) -> list[str]:
    return page.eval_on_selector_all(".mark", "(marks) => marks.map((mark) => mark.dataset.kind)")


def undisturbed(cluster: DemoCluster, max_tokens: int = 200, seed: int = 7) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0.7, "top_p": 1}
    answer = cluster.post("/v1/chat/completions", body | {"max_tokens": max_tokens, "seed": seed})
    return answer["choices"][0]["message"]["content"]


def wait_for_text(page: Page, num_chars: int) -> None:
    until(
        page, lambda: page.locator(ANSWER).count() > 0 and len(answer_of(page)) > num_chars, f"{num_chars} characters"
    )


def wait_for_end(page: Page) -> None:
    until(page, lambda: page.locator("#send").is_visible(), "the end of the answer", 240)


def test_without_a_key_only_the_key_form_is_shown_and_a_wrong_key_is_refused(
    chromium: Browser, cluster: DemoCluster
) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(cluster.url + "/")
    page.wait_for_selector("#key-form")
    assert page.url == cluster.url + "/ui"
    assert page.locator("#prompt, #live, #tabs a").count() == 0
    page.fill("#key", "wrong")
    page.click("#key-form button")
    until(page, lambda: "not accepted" in page.inner_text("#key-form"), "the refusal")
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.wait_for_selector("#prompt")
    assert page.evaluate("() => Object.values(localStorage).join().includes('ow-an-admin')") is False
    context.close()


def test_an_answer_goes_on_after_a_reload_with_the_same_text(page: Page, cluster: DemoCluster) -> None:
    ask(page)
    wait_for_text(page, 60)
    page.reload()
    until(page, lambda: "reload" in marks(page), "the mark")
    wait_for_end(page)
    # A busy machine makes pauses.
    assert [kind for kind in marks(page) if kind != "paused"] == ["reload"]
    assert answer_of(page) == undisturbed(cluster)
    assert "tokens/s" in page.inner_text(".assistant .facts") and "first token" in page.inner_text(".assistant .facts")


@pytest.mark.full
def test_stop_ends_it_and_continue_goes_on(page: Page, cluster: DemoCluster) -> None:
    ask(page, seed=8)
    wait_for_text(page, 60)
    page.click("#stop")
    wait_for_end(page)
    assert len(answer_of(page)) < len(undisturbed(cluster, seed=8))
    page.get_by_role("button", name="Continue").click()
    wait_for_end(page)
    assert answer_of(page) == undisturbed(cluster, seed=8)


@pytest.mark.parametrize("target", ["worker", pytest.param("instance", marks=pytest.mark.full)])
def test_a_killed_process_is_a_pause_and_a_mark(page: Page, cluster: DemoCluster, target: str) -> None:
    # Long enough that it still runs when the process is killed.
    answers = ((seed, undisturbed(cluster, 400, seed)) for seed in range(20, 60))
    seed, expected = next((seed, text) for seed, text in answers if len(text) > 1000)
    live = page.context.new_page()
    live.goto(cluster.url + "/ui")
    live.fill("#key", KEY)
    live.click("#key-form button")
    live.click("#tab-live")
    until(live, lambda: live.locator("section.instance").count() == 2, "both instances")
    ask(page, 400, seed)
    wait_for_text(page, 20)
    until(live, lambda: live.locator("#streams tbody tr").count() == 1, "the stream")
    [instance] = [stream["instance"] for stream in cluster.snapshot()["streams"]]
    live.click(f'section[data-instance="{instance}"] .kill-{target}')
    until(page, lambda: len(marks(page)) > 0, "a mark")
    assert set(marks(page)) <= {"paused", "moved"}
    wait_for_end(page)
    assert answer_of(page) == expected
    until(live, lambda: live.locator("section.instance .state.ready").count() == 2, "both are ready again", 240)
    live.close()


@pytest.mark.full
def test_an_instance_is_drained_and_taken_back_by_a_button(page: Page, cluster: DemoCluster) -> None:
    page.click("#tab-live")
    until(page, lambda: page.locator("section.instance .state.ready").count() == 2, "both instances", 240)
    card = page.locator("section.instance").first
    card.get_by_role("button", name="Drain", exact=True).click()
    until(page, lambda: card.locator(".state").inner_text() == "draining", "the drain")
    card.get_by_role("button", name="Undrain").click()
    until(page, lambda: card.locator(".state").inner_text() == "ready", "the end of the drain")


@pytest.mark.full
def test_a_stream_leads_to_its_trace_and_its_log_lines(page: Page, cluster: DemoCluster) -> None:
    page.click("#tab-live")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "ignore_eos": True}
    headers = {"X-Request-Id": "traced-one", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    asking = threading.Thread(target=cluster.post, args=("/v1/chat/completions", body), kwargs=headers)
    asking.start()
    try:
        opener = page.locator("#streams button.opener", has_text="traced-one")
        until(page, lambda: opener.count() == 1, "the stream")
        opener.click()
        link = page.locator("#streams tr.details a.trace")
        assert link.get_attribute("href") == f"http://traces.test/{trace_id}"
        assert (link.inner_text(), link.get_attribute("rel")) == (trace_id, "noopener noreferrer")
        stream_id = page.locator("#streams tr.details .stream-id").inner_text()
        assert re.fullmatch("[0-9a-f]{32}", stream_id)
        assert f"grep {stream_id}" in page.locator("#streams tr.details").inner_text()
        opener.click()
        assert page.locator("#streams tr.details").count() == 0
    finally:
        cluster.post("/v1/abort", {"all": True})
        asking.join()


@pytest.mark.full
def test_the_block_map_changes_under_preemption_and_a_stream_is_aborted_by_its_button(
    page: Page, cluster: DemoCluster
) -> None:
    page.click("#tab-live")
    until(page, lambda: page.locator(".blocks i").count() >= 160, "the map", 240)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 500, "ignore_eos": True}
    threads = [
        threading.Thread(
            target=cluster.post, args=("/v1/chat/completions", body), kwargs={"X-Request-Id": f"load-{index}"}
        )
        for index in range(16)
    ]
    for thread in threads:
        thread.start()
    seen: set[str] = set()

    def preempted() -> bool:
        owned = "(maps) => maps.map((map) => map.querySelectorAll('.b-owned').length).join()"
        seen.add(page.eval_on_selector_all(".blocks", owned))
        return "preemption" in page.inner_text("#live")

    until(page, preempted, "a preemption", 240)
    assert len(seen) > 3, "the map has changed"
    row = page.locator("#streams tbody tr").first
    until(page, row.is_visible, "a stream")
    name = row.locator("td").first.inner_text()
    row.get_by_role("button", name="Abort").click()
    until(page, lambda: page.locator("#streams td.id", has_text=re.compile(f"^{name}$")).count() == 0, "the abort")
    cluster.post("/v1/abort", {"all": True})
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_view_is_wider_than_its_window_in_either_colour_scheme(
    chromium: Browser, cluster: DemoCluster, width: int, scheme: Literal["light", "dark"]
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()

    def too_wide() -> list[str]:
        """Returns what would scroll sideways: the window, the view in it, or a part of the view."""
        return page.evaluate(
            """() => [...document.querySelectorAll("html, #main, #main > *, .side")]
                .filter((one) => one.scrollWidth > one.clientWidth || one.getBoundingClientRect().right > innerWidth)
                .map((one) => one.tagName + "." + one.className)"""
        )

    page.goto(cluster.url + "/")
    page.wait_for_selector("#key-form")
    assert too_wide() == []
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.wait_for_selector("#prompt")
    ask(page, 30, seed=9)
    wait_for_end(page)
    assert too_wide() == []
    for side in ("left", "right"):
        if page.locator(f"details.side.{side}[open]").count() == 0:
            page.click(f"details.side.{side} > summary")
    assert too_wide() == []
    page.click("#tab-live")
    until(page, lambda: page.locator("section.instance .blocks i").count() >= 160, "both instances", 240)
    assert too_wide() == []
    is_dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
    assert is_dark == (scheme == "dark")
    context.close()


def test_the_api_page_fits_a_phone_and_its_example_gets_an_answer(chromium: Browser, cluster: DemoCluster) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(cluster.url + "/docs")
    page.fill("#key", KEY)
    page.click("#load")
    chat = page.locator("details.operation").first
    chat.locator("summary").first.click()
    until(page, lambda: "messages" in chat.locator("textarea").input_value(), "the example")
    assert chat.locator("td:first-child").all_inner_texts()[:1] == ["messages"], "needed fields first"
    assert "-2^63" in chat.inner_text() and "9223372036854775808" not in chat.inner_text(), "bounds are exact"
    chat.locator(".send").click()
    until(page, lambda: chat.locator("pre").inner_text().startswith("200 OK"), "the answer")
    shown = chat.locator("pre").inner_text()
    assert '\n  "object": "chat.completion",\n' in shown, "it is indented"
    answer = json.loads(shown.partition("\n\n")[2])
    assert "4" in answer["choices"][0]["message"]["content"]
    assert {"retryable", "stage", "retry_after_s"} <= set(chat.locator("details.schema code").all_text_contents())
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    context.close()


# Hostile strings.


def sse(*chunks: Any) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def hostile_answer(index: int, text: str) -> str:
    call = {"index": 0, "id": text, "function": {"name": text, "arguments": text}}
    delta = {"content": text, "reasoning_content": text, "tool_calls": [call]}
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": text if index % 2 else "stop"}]})


def hostile_look(strings: list[str]) -> dict[str, Any]:
    requests = [
        {"id": f"{text}-{index}", "label": text, "caller": text, "state": text, "slot": index % 8, "trace_id": text}
        | {"num_generated_tokens": 1}
        for index, text in enumerate(strings)
    ]
    engine = {
        **dict.fromkeys(("step", "num_waiting", "num_generated_tokens", "num_preemptions", "blocks_per_cell"), 1),
        "num_slots": 8,
        "block_size": 16,
        "kv_blocks": {strings[0]: 1},
        "block_map": "o.",
        "num_requests": COUNT,
        "requests": requests,
    }
    process = {"role": strings[1], "pid": strings[2], "incarnation": strings[3], "state": strings[4]}
    instance = {"id": strings[5], "role": strings[6], "state": strings[7], "processes": [process], "restarts": {}}
    fields = {"attempt": 1, "num_tokens": 1, "is_paused": False}
    streams = [{name: one[name] for name in ("id", "label", "caller", "trace_id")} | fields for one in requests]
    resumes = [
        dict.fromkeys(("request_id", "cause", "from", "to", "outcome"), text) | {"pause_s": 1, "ago_s": 1}
        for text in strings[:16]
    ]
    models = [instance | {"id": f"{text}-{index}", "model": text} for index, text in enumerate(strings)]
    look = {"at_s": 1, "role": "router", "instances": [instance | {"engine": engine}, *models], "num_streams": COUNT}
    return look | {"streams": [one | {"instance": one["label"]} for one in streams], "resumes": resumes}


def hostile_openapi(strings: list[str]) -> dict[str, Any]:
    """Each string is a path, a text, and the name, type, default and value of a field."""

    def schema(text: str) -> dict[str, Any]:
        field = dict.fromkeys(("type", "description", "default"), text) | {"enum": [text]}
        return {"properties": {text: field, "model": field}, "required": [text], "type": text}

    def operation(text: str) -> dict[str, Any]:
        content = {"content": {"application/json": {"schema": schema(text)}}}
        return {"summary": text, "description": text, "requestBody": content, "responses": {text: content}}

    return {
        "info": {"version": strings[0]},
        "components": {"schemas": {text: schema(text) for text in strings}},
        "paths": {f"/{index}{text}": {"post": operation(text)} for index, text in enumerate(strings)},
    }


class Attacks:
    """What a page has run or fetched because of a hostile string."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._dialogs: list[str] = []
        self._requested: list[str] = []
        page.on("dialog", lambda dialog: self._dialogs.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda request: self._requested.append(request.url))

    def check(self, own_url: str) -> None:
        assert self._page.evaluate("() => window.hit") is None and self._dialogs == []
        assert not [url for url in self._requested if not url.startswith(own_url)]


def without_policy(route: Route) -> None:
    response = route.fetch()
    headers = {name: value for name, value in response.headers.items() if name != "content-security-policy"}
    route.fulfill(response=response, headers=headers)


PAGES_WITH_POLICY = re.compile(r"/(docs|ui(/[a-z_]+\.(js|css|svg))?)$")


@pytest.mark.full
@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy"])
def test_no_model_name_is_executed(page: Page, cluster: DemoCluster, has_policy: bool) -> None:
    attacks, strings = Attacks(page), hostile_strings()
    if not has_policy:
        page.route(PAGES_WITH_POLICY, without_policy)
    names = iter(strings)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": next(names)}]}))
    for text in strings:
        page.reload()
        page.wait_for_selector("#prompt")
        assert page.text_content("#model") == text
        assert page.text_content(".empty h1") == f"Talk to {text}"
    attacks.check(cluster.url)


@pytest.mark.full
@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy"])
def test_nothing_in_the_description_of_the_api_is_executed(page: Page, cluster: DemoCluster, has_policy: bool) -> None:
    attacks, strings = Attacks(page), hostile_strings()
    if not has_policy:
        page.route(PAGES_WITH_POLICY, without_policy)
    page.route("**/openapi.json", lambda route: route.fulfill(json=hostile_openapi(strings)))
    page.goto(cluster.url + "/docs")
    until(page, lambda: page.locator("details.operation").count() == COUNT, "the operations")
    page.evaluate("() => document.querySelectorAll('details.operation').forEach((one) => { one.open = true; })")
    until(page, lambda: page.locator("details.schema").count() == COUNT, "the responses")
    page.evaluate("() => document.querySelectorAll('details.schema').forEach((one) => { one.open = true; })")
    page.wait_for_timeout(500)
    assert page.locator(".about").all_text_contents() == strings
    attacks.check(cluster.url)


@pytest.mark.full
@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy"])
def test_nothing_that_a_server_or_a_client_says_is_executed(page: Page, cluster: DemoCluster, has_policy: bool) -> None:
    attacks, strings = Attacks(page), hostile_strings()
    if not has_policy:
        page.route(PAGES_WITH_POLICY, without_policy)
    answers = iter(enumerate(strings))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=hostile_answer(*next(answers)), content_type="text/event-stream"))  # fmt: skip
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": strings[8]}]}))
    page.route("**/ui/live", lambda route: route.fulfill(
        body=f"data: {json.dumps(hostile_look(strings))}\n\n", content_type="text/event-stream"))  # fmt: skip
    page.goto(cluster.url + "/ui")
    page.reload()
    page.wait_for_selector("#prompt")
    assert page.inner_text("#model") == strings[8] or page.text_content("#model") == strings[8]
    page.fill("textarea[name=system]", strings[9])
    for text in strings:
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        until(page, lambda: page.locator("#send").is_visible(), "the answer")
    assert page.locator(".message").count() == 2 * COUNT
    page.reload()
    until(page, lambda: page.locator(".message").count() == 2 * COUNT, "the conversation")
    page.click("#tab-live")
    until(page, lambda: page.locator("#streams tbody tr").count() == COUNT, "the streams")
    assert page.locator("section.instance").count() == COUNT + 1
    page.evaluate("() => document.querySelectorAll('#streams button.opener').forEach((opener) => opener.click())")
    page.wait_for_timeout(500)
    assert page.locator("#streams a.trace").count() == 0, "no text of a stranger becomes a link"
    attacks.check(cluster.url)

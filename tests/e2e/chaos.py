"""Load and faults at once, on a real cluster: every answer must equal the undisturbed one.

Streams follow one another in as many places as there are clients; beside them each role of the cluster has a thread that
disturbs it, one fault after the other: the next one comes when the last victim is ready again. In a second phase the
router itself is killed, and clients come back to it by `Last-Event-ID`.
"""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import msgspec

from tests.e2e import message_clients as messages
from tests.e2e import response_clients as responses
from tests.e2e.answers import Hearing, Question, ask, ask_again_and_again, num_tokens, questions
from tests.e2e.cluster import Cluster, Fault, Instance
from tests.e2e.response_clients import ResponseClient, ResponseHearing

STALL_TIMEOUT_S = 5.0
ROUTER_FLAGS = ("--stall-timeout-s", str(STALL_TIMEOUT_S), "--restart-grace-s", "3", "--retry-budget", "10")
"""The budget is against storms; here is one, ordered."""
ALL_FAULTS = (
    *(Fault("kill", target) for target in ("worker", "engine", "api", "instance")),
    *(Fault("stop", target) for target in ("worker", "engine", "api", "instance")),
    Fault("drain", "instance"),
    Fault("leave", "instance"),
)
ANSWER_PATIENCE_S = 240.0
LOOK_S = 0.25
MAX_WRONG = 10
"""More say nothing new."""

MAX_BREATH_S = 30.0
"""How long clients may take to get on after a fault before the next one comes anyway."""

AnyHearing = Hearing | ResponseHearing
Ask = Callable[[httpx.AsyncClient, Question, AnyHearing], Awaitable[dict[str, Any]]]


@dataclass
class Plan:
    seconds: float
    router_seconds: float
    num_clients: int = 32
    max_tokens: int = 64
    seed: int = 0
    roles: dict[str, tuple[Fault, ...]] = field(default_factory=lambda: {"prefill": ALL_FAULTS, "decode": ALL_FAULTS})
    """What may happen to whom. Each of them will, however long it takes."""

    def wanted(self) -> set[str]:
        return {f"{role}: {fault}" for role, faults in self.roles.items() for fault in faults}


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    """By kind of question."""
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    """By cause."""
    pauses_s: list[float] = field(default_factory=list)
    """Pauses of resumed streams, as the router measures them."""
    silences_s: list[float] = field(default_factory=list)
    """The longest of each stream, as its client measures it."""
    router_kills: int = 0
    returns: int = 0
    """How often clients whose connection broke came back."""
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": sum(self.requests.values()),
            "requests_by_kind": dict(sorted(self.requests.items())),
            "tokens": self.tokens,
            "faults": dict(sorted(self.faults.items())),
            "resumes": dict(sorted(self.resumes.items())),
            "pause_s": spread(self.pauses_s),
            "longest_silence_of_a_stream_s": spread(self.silences_s),
            "router_kills": self.router_kills,
            "client_returns": self.returns,
            "wrong": self.wrong,
        }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "max": round(ordered[-1], 3),
    }


class Chaos:
    def __init__(self, cluster: Cluster, plan: Plan, say: Callable[[str], None] = lambda _: None) -> None:
        self._cluster = cluster
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)
        self._questions = questions(plan.max_tokens) + responses.response_questions(plan.max_tokens)
        self._questions += messages.message_questions(plan.max_tokens)
        self._expected: dict[str, dict[str, Any]] = {}
        self._salts = itertools.count()
        self._seen_resumes: set[bytes] = set()
        self._over = threading.Event()
        self._hearings: dict[int, AnyHearing] = {}
        """What each client that reads a stream now has received, by client."""
        self.report = Report(plan.seed)

    def run(self) -> Report:
        asyncio.run(self._run())
        return self.report

    async def _run(self) -> None:
        started_s = time.monotonic()
        self._expected = {question.name: answer for question, answer in await self._ask_all()}
        self._say(f"{len(self._expected)} kinds of questions have their answers")
        await self._phase(self._disturbances(), self._ask_once)
        await asyncio.to_thread(self._cluster.wait_until_at_rest)
        self._look_for_crashes()
        if self._plan.router_seconds and not self.report.wrong:
            self._say("the router's turn")
            await self._phase([self._kill_routers], self._ask_patiently)
            await asyncio.to_thread(self._cluster.wait_until_at_rest)
            self._look_for_crashes()
        if never := self._plan.wanted() - self.report.faults.keys():
            self._note_wrong(f"never happened: {sorted(never)}")
        self.report.seconds = time.monotonic() - started_s

    def _look_for_crashes(self) -> None:
        """Counts deaths that this program did not cause: a crash that clients do not notice is a crash too."""
        for name, log in self._cluster.logs().items():
            if "Traceback" in log:
                self._note_wrong(f"{name} crashed:\n{log[log.index('Traceback') :][:4000]}")

    async def _ask_all(self) -> list[tuple[Question, dict[str, Any]]]:
        async with self._client() as client:
            calm = [responses.undisturbed(question, self._plan.max_tokens) for question in self._questions]
            answers = [self._answered(client, question, _new_hearing(question)) for question in calm]
            return list(zip(self._questions, await asyncio.gather(*answers), strict=True))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self._plan.num_clients + 4, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self._cluster.url, timeout=ANSWER_PATIENCE_S, limits=limits)

    async def _phase(self, disturbances: list[Callable[[], None]], how: Ask) -> None:
        """Clients ask as long as anybody disturbs them, and then hear their answers out."""
        self._over.clear()
        async with self._client() as client, asyncio.TaskGroup() as group:
            for number in range(self._plan.num_clients):
                group.create_task(self._keep_asking(client, number, how))
            watching = group.create_task(self._watch_resumes(client))
            try:
                await asyncio.gather(*(asyncio.to_thread(disturb) for disturb in disturbances))
            finally:
                self._over.set()
                watching.cancel()

    # Clients.

    async def _keep_asking(self, client: httpx.AsyncClient, number: int, how: Ask) -> None:
        order = self._questions[number % len(self._questions) :] + self._questions[: number % len(self._questions)]
        for question in itertools.cycle(order):
            if self._over.is_set():
                return
            hearing = _new_hearing(question)
            if question.streams:
                self._hearings[number] = hearing
            await self._ask_and_compare(client, question, hearing, how)
            self._hearings.pop(number, None)

    async def _ask_and_compare(
        self, client: httpx.AsyncClient, question: Question, hearing: AnyHearing, how: Ask
    ) -> None:
        try:
            async with asyncio.timeout(ANSWER_PATIENCE_S):
                answer = await how(client, question.salted(f"{next(self._salts)}"), hearing)
        except (AssertionError, httpx.HTTPError, TimeoutError, LookupError, ValueError) as fault:
            self._note_wrong(f"{question.name}: {type(fault).__name__}: {fault}")
            return
        self.report.requests[question.name] += 1
        self.report.tokens += num_tokens(answer)
        if not responses.agrees(answer, self._expected[question.name]):
            self._note_wrong(f"{question.name}: {difference(answer, self._expected[question.name])}")

    def _note_wrong(self, what: str) -> None:
        self._say(f"WRONG {what}")
        self.report.wrong.append(what)
        if len(self.report.wrong) >= MAX_WRONG:
            self._over.set()

    async def _ask_once(self, client: httpx.AsyncClient, question: Question, hearing: AnyHearing) -> dict[str, Any]:
        answer = await self._answered(client, question, hearing)
        if question.streams:
            self.report.silences_s.append(hearing.longest_silence_s)
        return answer

    async def _answered(self, client: httpx.AsyncClient, question: Question, hearing: AnyHearing) -> dict[str, Any]:
        if isinstance(hearing, Hearing):
            return await ask(client, question, hearing)
        return await ResponseClient(client, question, hearing, comes_back=False).answer()

    async def _ask_patiently(
        self, client: httpx.AsyncClient, question: Question, hearing: AnyHearing
    ) -> dict[str, Any]:
        if isinstance(hearing, Hearing):
            answer, num_returns = await ask_again_and_again(client, question, hearing)
        else:
            asking = ResponseClient(client, question, hearing, comes_back=True)
            answer, num_returns = await asking.answer(), asking.num_returns
        self.report.returns += num_returns
        return answer

    async def _watch_resumes(self, client: httpx.AsyncClient) -> None:
        """The router shows the last ones; looked at often, that is all of them."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                shown = (await client.get("/internal/status")).json()
                for resume in shown["resumes"]:
                    self._note_resume(resume)
            await asyncio.sleep(LOOK_S)

    def _note_resume(self, resume: dict[str, Any]) -> None:
        key = msgspec.json.encode({name: value for name, value in resume.items() if name != "ago_s"})
        if key not in self._seen_resumes:
            self._seen_resumes.add(key)
            self.report.resumes[f"{resume['cause']}, {resume['outcome']}"] += 1
            if resume["outcome"] == "inexact":
                self._note_wrong(f"instances that are the same differ: {resume}")
            self.report.pauses_s.append(resume["pause_s"])

    # Faults.

    def _disturbances(self) -> list[Callable[[], None]]:
        """One for each role, with a chance of its own: what one does is no matter of how fast another one is."""
        chances = {role: random.Random(self._chance.random()) for role in self._plan.roles}
        return [partial(self._disturb, role, chance) for role, chance in chances.items()]

    def _disturb(self, role: str, chance: random.Random) -> None:
        started_s = time.monotonic()
        faults = deck(self._plan.roles[role], chance)
        num_faults = 0
        while not self._over.is_set():
            if time.monotonic() - started_s > self._plan.seconds and num_faults >= len(self._plan.roles[role]):
                return
            # When it strikes, what is under way is a matter of chance: an offer, a transfer, a first token.
            self._over.wait(chance.uniform(0.2, 3.0))
            self._strike(next(faults), chance.choice(self._cluster.of_role(role)), chance)
            num_faults += 1
            self._let_clients_get_on()

    def _let_clients_get_on(self) -> None:
        """Each stream gets something between two faults of a role, however slow the machine: else it is not resumed
        any more, it only moves."""
        since_s = time.monotonic()
        while not self._over.wait(LOOK_S) and time.monotonic() - since_s < MAX_BREATH_S:
            if all(hearing.last_event_s > since_s for hearing in list(self._hearings.values())):
                return

    def _strike(self, fault: Fault, victim: Instance, chance: random.Random) -> None:
        stop_s = chance.choice([chance.uniform(0.2, 2.0), chance.uniform(STALL_TIMEOUT_S, STALL_TIMEOUT_S + 4)])
        started_s = time.monotonic()
        self._cluster.suffer(fault, victim, stop_s)
        self.report.faults[f"{victim.role}: {fault}"] += 1
        took_s = time.monotonic() - started_s
        asked = sum(self.report.requests.values())
        self._say(f"{fault} of {victim.name}: ready again after {took_s:.1f} s; {asked} answers so far")

    def _kill_routers(self) -> None:
        started_s = time.monotonic()
        while not self._over.is_set() and time.monotonic() - started_s < self._plan.router_seconds:
            self._over.wait(self._chance.uniform(0.5, 3.0))
            self._cluster.router.kill()
            self._cluster.router.start_again()
            self._cluster.wait_until_ready()
            self.report.router_kills += 1
            self._say(f"router killed; {self.report.returns} returns so far")


def _new_hearing(question: Question) -> AnyHearing:
    if question.path == messages.PATH:
        return messages.MessageHearing()
    return ResponseHearing() if question.path == responses.PATH else Hearing()


def deck(faults: tuple[Fault, ...], chance: random.Random) -> Iterator[Fault]:
    """In a new order each time; each as often as any other."""
    while True:
        yield from chance.sample(faults, len(faults))


def difference(one: Any, other: Any, where: str = "answer") -> str:
    """Where two answers part, in a line."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(difference(one[key], other[key], f"{where}.{key}") for key in one if one[key] != other[key])
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        at = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return difference(one[at], other[at], f"{where}[{at}]")
    return f"{where} is {str(one)[:400]!r}, undisturbed {str(other)[:400]!r}"

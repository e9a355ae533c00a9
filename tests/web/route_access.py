"""Asks every route of a server for every method, without a key, as a user and as an admin. Knows neither server."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from onward.proto.api_key_entry import ApiKeyEntry
from onward.web.auth.api_key_table import HASH_PREFIX, hash_key
from onward.web.auth.authenticator import GuardedRoute, RouteAccess

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
KEYS = {"user": "ow-key-of-a-user", "other": "ow-key-of-another", "admin": "ow-key-of-an-admin"}
REFUSED = (401, 403)
OLLAMA_PATHS = tuple(f"/api/{name}" for name in ("chat", "generate", "embed", "tags", "show", "ps", "version"))


def entries() -> list[ApiKeyEntry]:
    return [
        ApiKeyEntry(
            name=name, digest=hash_key(key).removeprefix(HASH_PREFIX), role="admin" if name == "admin" else "user"
        )
        for name, key in KEYS.items()
    ]


def header(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {KEYS[name]}"}


@dataclass(frozen=True)
class Question:
    method: str
    path: str
    access: RouteAccess
    name: str | None

    @property
    def expected(self) -> tuple[int, ...] | None:
        """None: whatever it is, it is no refusal."""
        if self.access is RouteAccess.OPEN:
            return None
        if self.name is None:
            return (401,)
        return (403,) if self.name == "user" and self.access is not RouteAccess.USER else None


def questions(routes: Iterable[GuardedRoute], last: tuple[str, ...] = ()) -> Iterator[Question]:
    """`last`: after which a server is not as before."""
    for route in sorted(routes, key=lambda route: route.path in last):
        path = route.path.replace("{model:path}", "a/b")
        for method in METHODS:
            for name in (None, "user", "admin"):
                yield Question(method, path, route.access, name)


def wrong_answers(asked: Iterable[Question], ask: Callable[[Question], int]) -> list[str]:
    wrong: list[str] = []
    for question in asked:
        status = ask(question)
        expected = question.expected
        if (status in REFUSED) if expected is None else (status not in expected):
            wrong.append(f"{question.method} {question.path} as {question.name}: {status}")
    return wrong

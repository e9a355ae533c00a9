"""The table of API keys: the name, role and limits of each. Takes text and keys, and does no I/O.

    [[key]]
    name = "team-a"
    hash = "blake2b:…"          64 hexadecimal digits, as `onward keys add` writes them
    role = "user"               or "admin"
    max_in_flight = 8           this and the following are optional
    tokens_per_minute = 60000
    priority = 10
    max_connections = 64

A table contains hashes, never keys. Keys have 256 random bits, so no search can find the key of a plain hash.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onward.errors import StartupError
from onward.proto.api_key_entry import ApiKeyEntry, KeyRole
from onward.proto.engine import CallerLimits

HASH_PREFIX = "blake2b:"
DIGEST_BYTES = 32
MAX_KEYS = 4096
MAX_NAME_LENGTH = 64
MAX_LIMIT = 1 << 40
MAX_PRIORITY = 1 << 31

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of an API key. On a server without keys every client is the anonymous admin."""

    name: str = ""
    role: KeyRole = "admin"
    max_in_flight: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None
    max_connections: int | None = None

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    @property
    def limits(self) -> CallerLimits | None:
        """The limits that the engine enforces; None: there are none."""
        if self.max_in_flight is None and self.tokens_per_minute is None:
            return None
        return CallerLimits(self.max_in_flight, self.tokens_per_minute)

    @property
    def access_filter(self) -> str | None:
        """This caller may only see streams of the caller with this name. None: it may see all streams."""
        return None if self.is_admin else self.name


ANONYMOUS = Caller()


class ApiKeyTable:
    def __init__(self, entries: Sequence[ApiKeyEntry] = ()) -> None:
        self.entries = tuple(entries)
        self._callers = [
            (
                bytes.fromhex(entry.digest),
                Caller(
                    entry.name,
                    entry.role,
                    entry.max_in_flight,
                    entry.tokens_per_minute,
                    entry.priority,
                    entry.max_connections,
                ),
            )
            for entry in self.entries
        ]

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, bearer: str) -> Caller | None:
        """Returns the caller with this key, or None. The time depends neither on the number of correct digits nor on
        the key's position in the table."""
        bearer_digest = _digest(bearer)
        match: Caller | None = None
        for digest, caller in self._callers:
            # All entries are compared, and by digest, so that the time reveals nothing about a key.
            if hmac.compare_digest(bearer_digest, digest):
                match = caller
        return match

    def named(self, name: str) -> Caller | None:
        """Returns the caller with this name, or None. Without keys, returns the anonymous caller, which has every
        role."""
        if not self._callers:
            return ANONYMOUS
        return next((caller for _, caller in self._callers if caller.name == name), None)


def hash_key(key: str) -> str:
    """Returns the hash of a key as the table contains it."""
    return HASH_PREFIX + _digest(key).hex()


def admin_entries(keys: Iterable[str]) -> list[ApiKeyEntry]:
    """Returns entries for keys that were given without a table. They are named `key-1` and so on, and all are
    admins."""
    return [
        ApiKeyEntry(name=f"key-{number}", digest=_digest(key).hex(), role="admin") for number, key in enumerate(keys, 1)
    ]


def merge_tables(*tables: Iterable[ApiKeyEntry]) -> ApiKeyTable:
    """Returns one table of all entries. Raises `StartupError` if two keys have the same name, or two names the same
    key."""
    entries = [entry for table in tables for entry in table]
    names, digests = set[str](), set[str]()
    for entry in entries:
        if entry.name in names or entry.digest in digests:
            duplicate = "name" if entry.name in names else "key"
            raise StartupError(f"API keys: the {duplicate} of {entry.name} is given twice")
        names.add(entry.name)
        digests.add(entry.digest)
    return ApiKeyTable(entries)


def parse_table(text: str, file: str) -> list[ApiKeyEntry]:
    """Returns the entries of a TOML text. Raises a `StartupError` that names the file, the entry and the field."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise StartupError(f"{file} is not TOML: {_without_text(fault)}") from None
    except RecursionError:
        raise StartupError(f"{file} is not TOML: it is nested too deeply") from None
    if unknown := sorted(table.keys() - {"key"}):
        raise StartupError(f"{file}: {unknown[0][:80]!r} is not known; a key begins with a line [[key]]")
    rows = table.get("key", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StartupError(f"{file}: key must be a list of tables, each beginning with a line [[key]]")
    if len(rows) > MAX_KEYS:
        raise StartupError(f"{file} has {len(rows)} keys, more than the {MAX_KEYS} that are allowed")
    entries: list[ApiKeyEntry] = []
    seen: dict[str, set[str]] = {"name": set(), "digest": set()}
    for number, row in enumerate(rows, 1):
        entry = _entry(row, f"{file}: key {number}")
        for field, value in (("name", entry.name), ("digest", entry.digest)):
            if value in seen[field]:
                field_name = "hash" if field == "digest" else field
                raise StartupError(f"{file}: key {number} ({entry.name}): {field_name}: is that of an earlier key")
            seen[field].add(value)
        entries.append(entry)
    return entries


def table_text(entry: ApiKeyEntry) -> str:
    """Returns the TOML text of one entry."""
    lines = ["[[key]]", f'name = "{entry.name}"', f'hash = "{HASH_PREFIX}{entry.digest}"', f'role = "{entry.role}"']
    lines += [f"{name} = {value}" for name in LIMITS if (value := getattr(entry, name)) is not None]
    return "\n".join(lines) + "\n"


def check_name(name: Any, location: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise StartupError(
            f"{location}: name: must be 1 to {MAX_NAME_LENGTH} letters, digits or ._@-, and begin with a letter or digit"
        )
    return name


def _entry(row: dict[str, Any], location: str) -> ApiKeyEntry:
    location = f"{location} ({check_name(row.get('name'), location)})"
    if unknown := sorted(row.keys() - _FIELDS.keys()):
        raise StartupError(f"{location}: {unknown[0][:80]}: is not known; there are {', '.join(_FIELDS)}")
    if "hash" not in row:
        raise StartupError(f"{location}: hash: is missing")
    return ApiKeyEntry(**{_STRUCT_NAMES.get(name, name): _FIELDS[name](value, location) for name, value in row.items()})


def _check_hash(value: Any, location: str) -> str:
    digest = value.removeprefix(HASH_PREFIX) if isinstance(value, str) and value.startswith(HASH_PREFIX) else ""
    if not _DIGEST.fullmatch(digest):
        # The value is not shown: it may be the key itself, by mistake.
        raise StartupError(f"{location}: hash: must be {HASH_PREFIX} and {2 * DIGEST_BYTES} hexadecimal digits")
    return digest


def _check_role(value: Any, location: str) -> str:
    if value not in ("user", "admin"):
        raise StartupError(f'{location}: role: must be "user" or "admin"')
    return value


def check_limit(name: str) -> Callable[[Any, str], int]:
    low, high = (-MAX_PRIORITY, MAX_PRIORITY) if name == "priority" else (1, MAX_LIMIT)

    def check(value: Any, location: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise StartupError(f"{location}: {name}: must be a whole number from {low} to {high}")
        return value

    return check


LIMITS = ("max_in_flight", "tokens_per_minute", "priority", "max_connections")
_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "name": check_name,
    "hash": _check_hash,
    "role": _check_role,
    **{name: check_limit(name) for name in LIMITS},
}
_STRUCT_NAMES = {"hash": "digest"}


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=DIGEST_BYTES).digest()


def _without_text(error: tomllib.TOMLDecodeError) -> str:
    """Returns where the TOML is invalid, but not the text there, which may be a key."""
    location = re.search(r"at (?:line \d+, column \d+|end of document)", str(error))
    return f"it cannot be read {location[0]}" if location else "it cannot be read"

"""An entry of the table of API keys, as processes exchange it: the hash of the key, never the key."""

from typing import Literal

import msgspec

from onward.proto.field_types import Priority, Serial

KeyRole = Literal["user", "admin"]


class ApiKeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    digest: str
    """Hash of the key, as hex."""
    role: KeyRole = "user"
    max_in_flight: Serial | None = None
    """Requests that may be under way at once."""
    tokens_per_minute: Serial | None = None
    priority: Priority | None = None
    """The best that its requests may ask for; smaller is served first."""
    max_connections: Serial | None = None
    """Exchanges that one process holds open at once."""

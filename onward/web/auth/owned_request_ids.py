"""Request ids that only their caller can look up.

The last digits of an id are a hash of the other digits and of the caller's name. So a lookup by another caller fails
without a search, and the answer reveals nothing: it is the same whether the stream runs, is stored, was aborted or
never existed.
"""

import hashlib

from onward.web.auth.api_key_table import Caller

MARK_DIGITS = 8


def make_owned_id(token: str, caller: str) -> str:
    """Returns the id for `token`, which is 32 random hexadecimal digits. Without a caller it is the token itself."""
    return token[:-MARK_DIGITS] + _mark(token[:-MARK_DIGITS], caller) if caller else token


def owns_request_id(caller: Caller, request_id: str) -> bool:
    """Returns whether the caller may look up this id: one of its own, or any id for an admin."""
    return caller.is_admin or request_id == make_owned_id(request_id, caller.name)


def _mark(digits: str, caller: str) -> str:
    return hashlib.blake2b(f"{digits};{caller}".encode(), digest_size=MARK_DIGITS // 2).hexdigest()

"""Ids of requests that only their owner can ask for.

The last digits of an id are a hash of the others and of its owner's name. So somebody else's stream is unknown before
anybody has looked for it, and nothing can be learnt from the answer: it is the same whether the stream runs, is kept, was
aborted or never was.
"""

import hashlib

from onward.web.auth.api_key_table import Caller

MARK_DIGITS = 8


def make_owned_id(token: str, caller: str) -> str:
    """From 32 random hexadecimal digits. What is nobody's in particular stays as it is."""
    return token[:-MARK_DIGITS] + _mark(token[:-MARK_DIGITS], caller) if caller else token


def owns_request_id(caller: Caller, request_id: str) -> bool:
    """Whether it is one of its own, whoever has it; admins may ask for any."""
    return caller.is_admin or request_id == make_owned_id(request_id, caller.name)


def _mark(digits: str, caller: str) -> str:
    return hashlib.blake2b(f"{digits};{caller}".encode(), digest_size=MARK_DIGITS // 2).hexdigest()

"""The owner of an id can be checked from the id and the owner's name alone."""

import secrets

from onward.web.auth.api_key_table import ANONYMOUS, Caller
from onward.web.auth.owned_request_ids import make_owned_id, owns_request_id

ANN, BOB, BOSS = Caller("ann", "user"), Caller("bob", "user"), Caller("boss", "admin")


def test_an_id_is_its_owners_and_any_admins_and_nobody_elses() -> None:
    for _ in range(100):
        own = make_owned_id(secrets.token_hex(16), ANN.name)
        assert len(own) == 32 and int(own, 16) >= 0
        assert [owns_request_id(one, own) for one in (ANN, BOB, BOSS, ANONYMOUS)] == [True, False, True, True]


def test_an_id_that_nobody_has_made_is_nobodys() -> None:
    for written in ("x", "", secrets.token_hex(16), "a" * 128, make_owned_id(secrets.token_hex(16), "")):
        assert [owns_request_id(one, written) for one in (ANN, BOB, BOSS)] == [False, False, True]


def test_without_a_name_an_id_is_as_it_was_drawn() -> None:
    assert make_owned_id("ab" * 16, "") == "ab" * 16

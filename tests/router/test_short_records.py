"""A client that has more of a stream than anybody's record: an older record of it is no reason to refuse."""

from onward.proto.cursor import ChoiceCursor, Cursor
from tests.router.test_core import World


def test_a_record_that_does_not_reach_the_clients_place_is_as_good_as_none() -> None:
    world = World("a")
    route = world.open()
    world.start(route, tokens=2)
    world.fail(route)
    world.core.close_stream(route, world.now_s, keep=True)
    request_id = route.stream.request_id
    known = world.core.resumable_streams.find(request_id, world.now_s)
    assert known is not None
    beyond, within = (Cursor(request_id, 1, 1, [ChoiceCursor(position)]) for position in (3, 2))
    assert world.core.resume_stream(known, beyond, world.now_s) is None
    again = world.core.resume_stream(known, within, world.now_s)
    assert again is not None
    assert again.stream.choices[0].token_ids == [1, 2]

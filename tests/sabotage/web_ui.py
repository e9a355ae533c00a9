"""Deliberate bugs in the live view and in the buttons of `--demo`."""

from collections.abc import Callable

from onward.api.endpoints import demo
from onward.cli import api_keys
from onward.engine import live_snapshot
from onward.engine.request import Request
from onward.router.endpoints import live as router_live
from onward.supervisor.core import SupervisorCore
from onward.supervisor.live_queries import LiveQueries
from onward.web.ui.live_feed import LiveFeed
from tests.sabotage.patches import Patches, Sabotage

FEED = "tests/web/test_live_feed.py::"


def _any_page_presses_the_buttons(patch: Patches) -> None:
    patch.put(demo, "check_own_page", lambda scope, host: None)
    patch.put(router_live, "check_own_page", lambda scope, host: None)


def _every_supervisor_kills(patch: Patches) -> None:
    def kill(original: Callable, self: SupervisorCore, target: str) -> list:
        self._settings = type(self._settings)(1, 5.0, 5.0, False, True)
        return original(self, target)

    patch.around(SupervisorCore, "_kill_for_demo", kill)


def _demo_is_for_every_host(patch: Patches) -> None:
    patch.put(api_keys, "is_loopback", lambda host: True)


def _viewers_without_bounds(patch: Patches) -> None:
    patch.put(LiveFeed, "_check_room", lambda self, caller: None)


def _looks_for_no_viewer(patch: Patches) -> None:
    """The task goes on when the last viewer has gone."""

    async def stream(original: Callable, self: LiveFeed, caller: str, send: Callable) -> None:
        self._viewers["nobody"] += 1
        await original(self, caller, send)

    patch.around(LiveFeed, "stream", stream)


def _views_hold_up_a_shutdown(patch: Patches) -> None:
    patch.put(LiveFeed, "close", lambda self: None)


def _a_dead_engine_is_waited_for(patch: Patches) -> None:
    patch.put(LiveQueries, "pop_all", lambda self: [])


def _all_requests_are_listed(patch: Patches) -> None:
    def listed(original: Callable, scheduler: object, live: list[Request]) -> list[Request]:
        return live

    patch.around(live_snapshot, "_listed_requests", listed)


def _all_blocks_are_mapped(patch: Patches) -> None:
    patch.put(live_snapshot, "MAX_BLOCK_CELLS", 1 << 40)


TABLE = [
    Sabotage(
        "demo-any-page",
        "a page of another site presses the buttons of --demo with an admin's key",
        _any_page_presses_the_buttons,
        ["tests/router/test_live.py::test_a_kill_button_reaches_the_instance_from_our_own_page_only"],
    ),
    Sabotage(
        "demo-always",
        "a supervisor without --demo kills processes for an api process",
        _every_supervisor_kills,
        ["tests/supervisor/test_demo.py::test_without_demo_nothing_is_killed"],
    ),
    Sabotage(
        "demo-anywhere",
        "--demo starts with an address of another machine",
        _demo_is_for_every_host,
        ["tests/cli/test_demo.py::test_an_instance_that_is_called_from_elsewhere_is_refused"],
    ),
    Sabotage(
        "viewers-unbounded",
        "any number of viewers watches a process",
        _viewers_without_bounds,
        [FEED + "test_viewers_are_bounded_in_all_and_for_each_caller"],
    ),
    Sabotage(
        "looks-without-viewers",
        "the server is looked at while there is no viewer",
        _looks_for_no_viewer,
        [FEED + "test_all_viewers_share_one_look_and_without_viewers_there_is_none"],
    ),
    Sabotage(
        "viewers-hold-up-a-shutdown",
        "a live view stays open when the server stops",
        _views_hold_up_a_shutdown,
        [FEED + "test_a_shutdown_ends_every_stream"],
    ),
    Sabotage(
        "live-look-at-a-dead-engine",
        "a look waits for an engine that is dead",
        _a_dead_engine_is_waited_for,
        [
            "tests/supervisor/test_live_queries.py::test_a_dead_engine_is_left_out_at_once_and_one_that_starts_is_not_asked"
        ],
    ),
    Sabotage(
        "live-all-requests",
        "a look lists every request of the engine",
        _all_requests_are_listed,
        ["tests/engine/test_live_snapshot.py::test_a_view_lists_so_many_requests_and_counts_the_others"],
    ),
    Sabotage(
        "live-all-blocks",
        "a look maps every block of the pool",
        _all_blocks_are_mapped,
        ["tests/engine/test_live_snapshot.py::test_a_map_of_any_pool_has_so_many_cells_at_most[100000]"],
    ),
]

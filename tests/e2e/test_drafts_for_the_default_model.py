"""The default model with a model or a layer that drafts for it, as real processes. Through kills and handoffs clients
get what a plain server says.

No cheap model gives the same answers. The drafter of a server repeats every token, which is right for some prompts. At a
prefill instance the model drafts for itself.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation.thinned_model import write_thinned
from onward.models.thinned import every_nth
from tests.e2e.pd_instances import SMALL, Pair, backend_of, ended, total
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams
from tests.e2e.test_pd_serving import make_key
from tests.models.echo import write_echo_layer, write_echo_model

MODEL = "smollm2-135m-instruct"
PATH = "/v1/completions"
FREE = "Once upon a time, in a small village by the sea,"
pytestmark = pytest.mark.full


def _body(prompt: str, **sampling: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 64, "ignore_eos": True} | sampling


BODIES = [
    _body("The song goes:" + " la" * 40, temperature=0),
    _body(FREE, temperature=0.8, seed=7),
    _body("Laugh:" + " ha" * 40, temperature=0.4, seed=1),
    _body(f"A story. {FREE}", temperature=0),
]


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    with Server(*SMALL) as plain:
        return [stream.result() for stream in run_streams(plain.url, BODIES, path=PATH)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and `layer` say every token once more."""
    root = tmp_path_factory.mktemp("drafters")
    write_echo_model(root / "model")
    write_echo_layer(root / "layer")
    return root


@pytest.fixture(scope="module", params=["eagle:{}/layer:3", "draft:{}/model:3"])
def server(request: pytest.FixtureRequest, folders: Path) -> Iterator[Server]:
    with Server(*SMALL, "--speculative", request.param.format(folders)) as server:
        yield server


def _fates(server: Server) -> tuple[float, float]:
    """How many were drafted, and how many of them accepted, since the engine was born."""
    drafted, accepted = (total(server, f"onward_spec_{kind}_tokens_total") for kind in ("drafted", "accepted"))
    return drafted, accepted


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_streams_go_on_when_a_process_is_killed_in_mid_draft(server: Server, expected: list[tuple], role: str) -> None:
    """Two at a time, for whom it pays to draft."""
    for first in (0, 2):
        pids, known = [server.pid(role)], [0.0]

        def kill(streams: list[Stream], pids: list[int] = pids, known: list[float] = known) -> None:
            if pids and sum(len(stream.token_ids) for stream in streams) > 50:
                os.kill(pids.pop(), signal.SIGKILL)
                if role == "worker":
                    known.append(_fates(server)[1])  # an engine that is born anew counts from zero

        streams = run_streams(server.url, BODIES[first : first + 2], kill, path=PATH)
        assert not pids, "the kill never came"
        assert [stream.result() for stream in streams] == expected[first : first + 2]
        assert _fates(server)[1] > known[-1], "drafts are right before the kill and after it"


def test_a_copy_with_every_third_layer_drafts_and_changes_nothing(expected: list[tuple], tmp_path: Path) -> None:
    """It is too dear for its chances, and tried once in a while."""
    write_thinned(MODEL, tmp_path / "thirds", partial(every_nth, n=3))
    with Server(*SMALL, "--speculative", f"draft:{tmp_path}/thirds:4") as server:
        told = [run_streams(server.url, [body], path=PATH)[0].result() for body in BODIES]
        assert told == expected
        assert _fates(server)[0] > 0


@pytest.mark.parametrize("backend", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("speculative", [f"draft:{MODEL}:4", "eagle:{}/layer:3"])
def test_a_pair_says_the_same_and_uses_what_was_handed_over(
    folders: Path, expected: list[tuple], tmp_path: Path, speculative: str, backend: str
) -> None:
    key = () if backend == "shm" else ("--cluster-key-file", str(make_key(tmp_path / "key")))
    decode = ("--local-prefill-tokens", "0", "--kv-backend", backend)
    with Pair(*key, "--speculative", speculative.format(folders), decode=decode) as pair:
        streams = run_streams(pair.decode.url, BODIES, path=PATH)
        assert [stream.result() for stream in streams] == expected
        drafted, accepted = _fates(pair.decode)
        assert accepted > 0
        if speculative.startswith("draft"):
            assert accepted == drafted, "the model knows what it will say, also at a temperature"
        assert backend_of(pair) == backend
        assert ended(pair.decode, "arrived") == len(BODIES)
        pair.wait_until_at_rest()

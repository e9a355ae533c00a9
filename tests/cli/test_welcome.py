import io

from rich.console import Console

from onward.cli.welcome import GREETING, welcome
from onward.config import ServeConfig
from onward.supervisor.pd import resolve

URL = "http://127.0.0.1:8000"


def said(config: ServeConfig, handoff_port: int | None = None) -> str:
    out = io.StringIO()
    welcome(Console(file=out, highlight=False, width=20), config, "small", URL, resolve(config, "", handoff_port))
    assert out.getvalue().splitlines()[1].startswith(GREETING), "`onward up` looks for it"
    return out.getvalue()


def test_an_instance_by_itself_shows_a_request_to_try() -> None:
    text = said(ServeConfig())
    assert f"at {URL}" in text
    assert f"curl {URL}/v1/chat/completions" in text


def test_a_prefill_instance_says_how_to_start_a_decode_instance_and_shows_no_request() -> None:
    text = said(ServeConfig(role="prefill", model="some/model", cluster_key_file="k"), 7000)
    assert "prefills small for decode instances at tcp://127.0.0.1:7000" in text
    assert (
        "onward serve --role decode --prefill-peers tcp://127.0.0.1:7000 --model some/model --cluster-key-file k"
        in text
    )
    assert "curl" not in text


def test_a_decode_instance_names_its_peers() -> None:
    text = said(ServeConfig(role="decode", prefill_peers="tcp://127.0.0.1:1,tcp://127.0.0.1:2"))
    assert "tcp://127.0.0.1:1, tcp://127.0.0.1:2" in text
    assert "curl" in text


def test_a_mixed_instance_with_a_hand_over_port_names_it() -> None:
    assert "tcp://127.0.0.1:7000" in said(ServeConfig(handoff_port=7000), 7000)

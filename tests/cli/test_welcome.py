import io

import msgspec
from rich.console import Console

from onward.cli.ready_message import READY_LINE_PREFIX, curl_example, print_ready, print_router_ready
from onward.config import RouterConfig, ServeConfig
from onward.supervisor.pd_config import resolve_pd
from onward.supervisor.registration_config import resolve_registration
from tests.supervisor.test_worker_wire import MODEL

URL = "http://127.0.0.1:8000"
CHAT_MODEL = msgspec.structs.replace(MODEL, name="small", tokenizer="tokenizer.json", chat_template="T")


def said(
    config: ServeConfig, handoff_port: int | None = None, *, needs_key: bool = False, quantization: str = "none"
) -> str:
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=20)
    pd, routers = resolve_pd(config, "", handoff_port), resolve_registration(config, 8000)
    model = msgspec.structs.replace(CHAT_MODEL, quantization=quantization)
    print_ready(console, config, model, URL, pd, routers, needs_key=needs_key)
    assert out.getvalue().splitlines()[1].startswith(READY_LINE_PREFIX), "`onward up` looks for it"
    return out.getvalue()


def test_an_instance_by_itself_shows_a_request_to_try() -> None:
    text = said(ServeConfig())
    assert f"at {URL}" in text
    assert f"curl {URL}/v1/chat/completions" in text


def test_an_instance_says_what_a_resumed_stream_is_guaranteed() -> None:
    assert "Resumed streams are bit-exact" in said(ServeConfig(), quantization="int8")
    assert "later ones may differ" in said(ServeConfig())


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


def test_a_mixed_instance_with_a_handoff_port_names_it() -> None:
    assert "tcp://127.0.0.1:7000" in said(ServeConfig(handoff_port=7000), 7000)


def test_an_instance_with_routers_names_them_and_itself() -> None:
    text = said(ServeConfig(router="http://127.0.0.1:8080,http://127.0.0.1:8081"))
    assert f"registers as {URL} with http://127.0.0.1:8080, http://127.0.0.1:8081" in text
    assert "registers" in said(ServeConfig(role="prefill", router="http://127.0.0.1:8080"), 7000)
    assert "registers" not in said(ServeConfig())


def test_a_router_says_how_instances_join_it() -> None:
    out = io.StringIO()
    config = RouterConfig(cluster_key_file="k", decode_policy="prefix")
    print_router_ready(Console(file=out, highlight=False, width=20), config, URL)
    assert out.getvalue().splitlines()[1] == f"{READY_LINE_PREFIX}routes at {URL} by least_loaded, decode by prefix"
    assert f"onward serve --router {URL} --port 0 --cluster-key-file k" in out.getvalue()


def test_the_request_to_try_has_a_place_for_a_key_where_one_is_needed() -> None:
    assert "Bearer" in curl_example(CHAT_MODEL, URL, needs_key=True)
    assert "Bearer" not in curl_example(CHAT_MODEL, URL)
    assert "Bearer" in said(ServeConfig(), needs_key=True)
    assert "Bearer" not in said(ServeConfig())


def test_the_request_to_try_is_one_that_the_model_can_answer() -> None:
    without_template = msgspec.structs.replace(CHAT_MODEL, chat_template=None)
    assert f"{URL}/v1/completions" in curl_example(without_template, URL)
    assert '"prompt": "The capital' in curl_example(without_template, URL)
    without_tokenizer = msgspec.structs.replace(without_template, tokenizer=None)
    assert '"prompt": [1]' in curl_example(without_tokenizer, URL)

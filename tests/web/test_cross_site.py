"""Requests of web pages at a server without API keys: whose are served, and what the refusal names."""

import pytest
from starlette.types import Scope

from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.cross_site import OPEN_PATHS, CrossSiteGuard, check_content_type
from tests.web.exchange import request_scope

HERE = AllowedHosts.for_server("127.0.0.1", ("gpu-box.example",))
EVERYWHERE = AllowedHosts.for_server("0.0.0.0", ())
OURS = "127.0.0.1:8000"


def named(headers: dict[str, str], *origins: str, hosts: AllowedHosts = HERE, path: str = "/v1/abort") -> str | None:
    """The header that the refusal names, if there is one."""
    refusal = CrossSiteGuard(hosts, origins).refusal(request_scope(path, headers))
    if refusal is None:
        return None
    assert refusal.status == 403 and refusal.message.startswith(f"{refusal.param}: ")
    return refusal.param


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LOCALHOST.", "app.localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8000",
        "gpu-box.example", "GPU-box.example:443", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "127.0.0.1.",
    ],
)  # fmt: skip
def test_a_server_of_this_machine_is_called_by_its_own_names(host: str) -> None:
    assert named({"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example", "192.0.2.7:8000", "[fe80::1]",
        "gpu-box.example.attacker.example", "", ":8000", "[::1", "localhost:x", "localhost:8000:1", "a b", "2130706433",
        "[127.0.0.1]", "localhost:99999", "localhost\xe9",
    ],
)  # fmt: skip
def test_a_page_that_has_given_its_name_our_address_is_refused(host: str) -> None:
    assert named({"Host": host}) == "Host"
    assert named({"Host": host, "Origin": f"http://{host}"}, "*") == "Host", "pages of any origin, but not of any name"


@pytest.mark.parametrize("before", ["attacker.example/", "user@a", "a b", ".", "attacker.example%00", "a\\"])
def test_a_host_that_is_no_host_name_is_not_ours(before: str) -> None:
    assert named({"Host": f"{before}.localhost"}) == "Host"


@pytest.mark.parametrize("name", ["[2001:db8::1]", "2001:DB8:0::1"])
def test_an_address_is_allowed_however_it_is_written(name: str) -> None:
    assert named({"Host": "[2001:db8::1]:8000"}, hosts=AllowedHosts.for_server("127.0.0.1", (name,))) is None


@pytest.mark.parametrize("host", ["10.1.2.3:8000", "[2001:db8::1]:8000", "localhost:8000", "127.0.0.1"])
def test_a_server_that_listens_everywhere_is_called_by_any_address(host: str) -> None:
    assert named({"Host": host}, hosts=EVERYWHERE) is None


def test_a_name_that_was_not_told_is_refused_there_too_unless_any_will_do() -> None:
    assert named({"Host": "onward.default.svc:8000"}, hosts=EVERYWHERE) == "Host"
    assert named({"Host": "anything"}, hosts=AllowedHosts.for_server("0.0.0.0", ("*",))) is None


def test_clients_that_are_no_browsers_say_neither_where_they_come_from_nor_need_they_say_a_host() -> None:
    assert named({}) is None and named({"Host": OURS}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:8000"},
        {"Origin": "https://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_our_own_page_and_a_person_at_a_browser_are_served(headers: dict[str, str]) -> None:
    assert named({"Host": OURS, **headers}) is None


def test_an_origin_with_the_port_that_its_scheme_implies_is_the_same() -> None:
    assert named({"Host": "gpu-box.example", "Origin": "https://gpu-box.example"}) is None
    assert named({"Host": "gpu-box.example:443", "Origin": "https://gpu-box.example"}) is None
    assert named({"Host": "gpu-box.example:80", "Origin": "https://gpu-box.example"}) == "Origin"


@pytest.mark.parametrize(
    "origin",
    [
        "https://attacker.example", "null", "http://127.0.0.1:3000", "http://localhost:8000", "", "127.0.0.1:8000",
        "http://user@127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000.",
    ],
)  # fmt: skip
@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", None])
def test_pages_of_other_origins_are_refused(origin: str, site: str | None) -> None:
    told = {"Host": OURS, "Origin": origin} | ({} if site is None else {"Sec-Fetch-Site": site})
    assert named(told) == "Origin"
    assert named(told, "https://allowed.example") == "Origin"
    assert named(told, "*") is None


def test_a_page_of_another_scheme_is_not_our_own() -> None:
    assert named({"Host": OURS, "Origin": f"tauri://{OURS}"}) == "Origin"
    assert named({"Host": OURS, "Origin": f"tauri://{OURS}"}, f"tauri://{OURS}") is None


def test_a_port_of_zero_is_not_the_default_one() -> None:
    assert named({"Host": "localhost", "Origin": "http://localhost:0"}) == "Origin"


def test_pages_of_an_allowed_origin_are_served() -> None:
    told = {"Host": OURS, "Origin": "https://allowed.example", "Sec-Fetch-Site": "cross-site"}
    assert named(told, "https://allowed.example") is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_whose_browser_tells_no_origin_is_refused_by_its_site(site: str) -> None:
    told = {"Host": OURS, "Sec-Fetch-Site": site}
    assert named(told) == named(told, "https://allowed.example") == "Sec-Fetch-Site"
    assert named(told, "*") is None


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_and_links_to_the_page_for_people_are_served(path: str) -> None:
    assert named({"Host": "any.example", "Origin": "null", "Sec-Fetch-Site": "cross-site"}, path=path) is None


def posted(content_type: str | None, path: str = "/v1/chat/completions", **headers: str) -> Scope:
    given = headers if content_type is None else headers | {"Content-Type": content_type}
    return {**request_scope(path, given), "method": "POST"}


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json", "application/octet-stream"],
)
def test_a_body_of_json_or_of_no_stated_type_is_taken(content_type: str | None) -> None:
    assert check_content_type(posted(content_type)) is None


@pytest.mark.parametrize("path", ["/v1/abort", "/internal/register"])
@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "text/plain;a=application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
    ],
)
def test_a_type_that_pages_may_send_without_asking_is_refused(content_type: str, path: str) -> None:
    refusal = check_content_type(posted(content_type, path))
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.param) == (415, "unsupported_media_type", "Content-Type")
    assert refusal.message.startswith("Content-Type: must be application/") and "-H 'Content-Type: " in refusal.message


def test_between_routers_and_instances_a_body_says_what_it_is_or_is_proven() -> None:
    register = "/internal/register"
    assert check_content_type(posted("application/msgpack", register)) is None
    assert check_content_type(posted(None, register, **{"X-Onward-Proof": "x"})) is None
    refusal = check_content_type(posted(None, register))
    assert refusal is not None and refusal.status == 415
    assert check_content_type(posted("application/msgpack")) is not None, "clients send JSON"


def test_requests_without_a_body_need_no_type() -> None:
    assert check_content_type(request_scope("/v1/models", {"Content-Type": "text/plain"})) is None

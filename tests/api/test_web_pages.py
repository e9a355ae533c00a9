"""Web pages at an instance without API keys, over real HTTP: what they can do, which is nothing."""

from collections.abc import Iterator

import httpx
import pytest

from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES

OTHER_SITE = {"Origin": "https://attacker.example", "Sec-Fetch-Site": "cross-site"}
ALLOWED = {"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}
REBOUND = {"Host": "attacker.example:8000", "Origin": "http://attacker.example:8000", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def http(instance: Instance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as client:
        yield client


@pytest.mark.parametrize("page", [OTHER_SITE, REBOUND])
@pytest.mark.parametrize("path", ["/drain", "/v1/abort", "/v1/completions", "/tokenize", "/internal/attempt"])
def test_a_page_of_another_site_is_refused_and_the_header_named(
    http: httpx.Client, path: str, page: dict[str, str]
) -> None:
    answer = http.post(path, json={"all": True}, headers=page)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (403, "forbidden", next(iter(page)))
    assert "access-control-allow-origin" not in answer.headers
    assert http.get("/health").json()["status"] == "ok", "it was not drained"


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/info", "/openapi.json"])
def test_a_page_that_has_given_its_name_our_address_reads_nothing(http: httpx.Client, path: str) -> None:
    answer = http.get(path, headers={name: value for name, value in REBOUND.items() if name != "Origin"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Host")


def test_a_page_of_an_allowed_origin_is_served(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "x"}, headers=ALLOWED)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.org")


def test_a_form_is_refused_and_a_body_without_a_type_is_taken(http: httpx.Client) -> None:
    body = b'{"prompt": "x"}'
    form = http.post("/tokenize", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (form.status_code, form.json()["error"]["param"]) == (415, "Content-Type")
    assert http.post("/tokenize", content=body).status_code == 200

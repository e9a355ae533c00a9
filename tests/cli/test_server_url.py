import ssl

import pytest

from onward.cli.main import run
from onward.cli.server_url import checked_url, describe_error
from onward.errors import InvalidRequest


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/", "https://example.com", "http://[::1]:8000/prefix"])
def test_an_address_is_taken_without_its_last_slash(url: str) -> None:
    assert checked_url(url, "--url") == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:0", "http://x:99999", "http://x:y", "http://[::1"]
)
def test_what_is_no_address_is_refused_by_the_flag(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--url .* is not an address such as"):
        checked_url(url, "--url")


@pytest.mark.parametrize(
    "command",
    [["chat"], ["bench"], ["run-batch", "in", "out"], ["status", "URL"], ["drain", "URL"]],
    ids=lambda c: c[0],
)
def test_every_command_refuses_it_before_it_asks_anybody(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:99999"
    flags = [word.replace("URL", url) for word in command] if "URL" in command else [*command, "--url", url]
    assert run(flags) == 1
    assert f"'{url}' is not an address such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_why_nobody_answers_is_told_in_few_words() -> None:
    assert describe_error(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert describe_error(ssl.SSLError(1, "certificate verify failed")) == "certificate verify failed"
    assert describe_error(TimeoutError()) == "TimeoutError"

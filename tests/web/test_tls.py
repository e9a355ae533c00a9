"""HTTPS with a certificate of our own making, and files that are none."""

import asyncio
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.web import asgi
from onward.web.server.http_server import HttpServer
from onward.web.server.tls_files import TlsFiles, check_tls, tls_files
from tests.web import certificate


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return certificate.make(tmp_path_factory.mktemp("tls"))


async def scheme(scope: Scope, receive: Receive, send: Send) -> None:
    await asgi.respond(send, 200, scope["scheme"].encode())


def test_a_client_that_trusts_the_certificate_is_served_and_others_turn_away(files: tuple[str, str]) -> None:
    async def scenario() -> None:
        started = asyncio.Event()
        server = HttpServer(scheme, started.set, tls=TlsFiles(*files))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            await started.wait()
            url = f"https://127.0.0.1:{listening.getsockname()[1]}/"
            trusting = ssl.create_default_context(cafile=files[0])
            async with aiohttp.ClientSession() as session:
                async with session.get(url, ssl=trusting) as response:
                    assert await response.read() == b"https"
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.get(url, ssl=ssl.create_default_context())
                with pytest.raises(aiohttp.ClientError):
                    await session.get(url.replace("https", "http"))
            server.stop(0.0, lambda: None)
            await serving

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [ServeConfig, RouterConfig])
def test_certificate_and_key_come_together(kind: type[ServeConfig] | type[RouterConfig]) -> None:
    assert tls_files(kind()) is None
    assert tls_files(kind(tls_cert="c", tls_key="k")) == TlsFiles("c", "k")
    with pytest.raises(StartupError, match="--tls-key is missing"):
        tls_files(kind(tls_cert="c"))
    with pytest.raises(StartupError, match="--tls-cert is missing"):
        tls_files(kind(tls_key="k"))


def test_files_that_cannot_be_used_are_named(files: tuple[str, str], tmp_path: Path) -> None:
    cert, key = files
    check_tls(TlsFiles(cert, key))
    with pytest.raises(StartupError, match=r"--tls-cert .*/nothing: No such file"):
        check_tls(TlsFiles(str(tmp_path / "nothing"), key))
    with pytest.raises(StartupError, match=r"--tls-key .*/nothing: No such file"):
        check_tls(TlsFiles(cert, str(tmp_path / "nothing")))
    with pytest.raises(StartupError, match=r"--tls-cert .* and --tls-key .* are not a certificate and its key"):
        check_tls(TlsFiles(key, key))

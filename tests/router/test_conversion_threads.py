"""Large requests of Ollama's API are converted outside of a router's event loop."""

import asyncio
import threading

import pytest

from onward.clock import SystemClock
from onward.router.conversion_threads import MAX_BYTES_AT_ONCE, ConversionThreads
from onward.web.ollama_api.ollama_conversion import ConvertedRequest, convert_chat


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_request_is_converted_in_a_thread(is_large: bool) -> None:
    threads: list[int] = []

    def conversion() -> ConvertedRequest:
        threads.append(threading.get_ident())
        return convert_chat(b'{"model": "m"}')

    async def convert() -> ConvertedRequest:
        return await ConversionThreads(SystemClock()).run("", conversion, MAX_BYTES_AT_ONCE + is_large)

    assert asyncio.run(convert()).model == "m"
    assert (threads != [threading.get_ident()]) == is_large

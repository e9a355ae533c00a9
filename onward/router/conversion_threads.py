"""Converts requests of Ollama's API at a router: large ones in threads, so that the router's streams do not wait."""

from concurrent.futures import ThreadPoolExecutor

from onward.clock import Clock
from onward.web.fair_executor import FairExecutor
from onward.web.fair_scheduler import FairSchedulerLimits
from onward.web.ollama_api.ollama_conversion import ConvertedRequest
from onward.web.ollama_api.ollama_endpoints import Conversion, convert_at_once

MAX_BYTES_AT_ONCE = 32 << 10
"""Bodies up to this size are converted on the event loop, in a few milliseconds at most."""
LIMITS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=512, waiting_per_caller=128, bytes_per_caller=64 << 20
)


class ConversionThreads:
    def __init__(self, clock: Clock) -> None:
        threads = ThreadPoolExecutor(LIMITS.running, thread_name_prefix="conversions")
        self._executor = FairExecutor(threads, LIMITS, clock, "requests to convert")

    async def run(self, caller: str, conversion: Conversion, num_bytes: int) -> ConvertedRequest:
        """Returns the converted request of a body of this many bytes."""
        if num_bytes <= MAX_BYTES_AT_ONCE:
            return await convert_at_once(caller, conversion, num_bytes)
        return await self._executor.run(caller, conversion, num_bytes)

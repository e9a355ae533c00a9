"""What instances have kept of a stream or a response, and whether that is all there is. Knows not what a record says."""

import asyncio
from dataclasses import dataclass

from onward.proto.router import StreamRecord
from onward.router.stream_runner import StreamRunner


@dataclass(frozen=True, slots=True)
class FoundRecords:
    by_url: dict[str, StreamRecord]
    """Of each instance that has one."""
    is_complete: bool
    """Every instance has answered, and there is one: what is not here is unknown, and not only out of reach."""

    @property
    def records(self) -> list[StreamRecord]:
        return list(self.by_url.values())


async def find_records(serving: StreamRunner, request_id: str) -> FoundRecords:
    urls = [replica.url for replica in serving.core.serving_instances(serving.clock.now_s())]
    answers = await asyncio.gather(*(serving.upstream.find_record(url, request_id) for url in urls))
    found = zip(urls, (record for record, _ in answers), strict=True)
    records = {url: one for url, one in found if one is not None and one.attempt.request_id == request_id}
    return FoundRecords(records, is_complete=bool(urls) and all(has_answered for _, has_answered in answers))

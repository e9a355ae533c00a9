"""Queries instances for their records of a stream or a response, and whether all of them answered. Does not interpret
records."""

import asyncio
from dataclasses import dataclass

from onward.proto.router import StreamRecord
from onward.router.stream_runner import StreamRunner


@dataclass(frozen=True, slots=True)
class FoundRecords:
    by_url: dict[str, StreamRecord]
    """The record of each instance that has one."""
    is_complete: bool
    """Every instance has answered, and there is one: what is not here is unknown, and not only out of reach."""

    @property
    def records(self) -> list[StreamRecord]:
        return list(self.by_url.values())


async def find_records(runner: StreamRunner, request_id: str) -> FoundRecords:
    urls = [instance.url for instance in runner.core.serving_instances(runner.clock.now_s())]
    replies = await asyncio.gather(*(runner.upstream.find_record(url, request_id) for url in urls))
    found = zip(urls, (record for record, _ in replies), strict=True)
    records = {url: record for url, record in found if record is not None and record.attempt.request_id == request_id}
    return FoundRecords(records, is_complete=bool(urls) and all(has_answered for _, has_answered in replies))

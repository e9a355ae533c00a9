"""What instances have kept of a stream or a response, and whether that is all there is. Knows not what a record says."""

import asyncio
from dataclasses import dataclass

from onward.proto.router import Record
from onward.router.serving import Serving


@dataclass(frozen=True, slots=True)
class Kept:
    by_url: dict[str, Record]
    """Of each instance that has one."""
    is_all: bool
    """Every instance has answered, and there is one: what is not here is unknown, and not only out of reach."""

    @property
    def records(self) -> list[Record]:
        return list(self.by_url.values())


async def kept_at_instances(serving: Serving, request_id: str) -> Kept:
    urls = [replica.url for replica in serving.core.takers(serving.clock.now_s())]
    answers = await asyncio.gather(*(serving.upstream.find(url, request_id) for url in urls))
    found = zip(urls, (record for record, _ in answers), strict=True)
    records = {url: one for url, one in found if one is not None and one.attempt.request_id == request_id}
    return Kept(records, is_all=bool(urls) and all(has_answered for _, has_answered in answers))

"""A simulated client of `/v1/messages`: it reads the typed events of a message, and resumes it as any other stream."""

import asyncio
from typing import Any

import msgspec

from onward.sim import message_check
from onward.sim.client import RETRY_S, SimClient, error_status, events_of
from onward.sim.http import SimHttpResponse
from onward.sim.reply_check import InvariantError, ReplyChecker


class SimMessagesClient(SimClient):
    def _reply(self, history: list[dict[str, str]]) -> ReplyChecker:
        return message_check.MessageChecker(self.request, self._prompt(history))

    def _body(self, history: list[dict[str, str]]) -> dict[str, Any]:
        return message_check.body_of(self.request, history)

    async def _read_stream(self, checker: ReplyChecker, response: SimHttpResponse) -> None:
        error = None
        async for event_id, data in events_of(response):
            event = msgspec.json.decode(data)
            if error is not None:
                raise InvariantError(1, f"{event['type']} follows an error")
            if event["type"] == "error":
                error = event["error"]
                if "partial" in event:
                    checker.check_partial(event["partial"])
                continue
            checker.take_event(event_id, event)
            if self.request.reads_slowly:
                await asyncio.sleep(0.3)
        if error is not None:
            self._raise_for_error(error_status(error), error["code"], RETRY_S, checker)
        if not checker.is_finished and not checker.was_given_up:
            raise InvariantError(1, "the stream of a message ends without its end")

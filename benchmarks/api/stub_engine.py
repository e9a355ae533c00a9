"""An engine that computes nothing: it keeps the engine's contract with one api process, and sends tokens at its own pace.

For measuring the api process in front of it. All requests step together, one token each, as those of an engine do; the
tokens are one list, over and over, and every request ends at its `max_tokens`.

    python -m benchmarks.api.stub_engine --address ADDRESS --incarnation NAME --interval-ms 20 --token-ids 5,17,9
"""

import argparse
import math
import time
from dataclasses import dataclass

from onward.proto.engine import (
    Abort,
    AbortByName,
    AbortReply,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    QueryKvEvents,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
)
from onward.proto.trace import PhaseChange, RequestPhases
from onward.transport.zmq_sockets import SocketPoller

HOLDING_EVERY_S = 1.0
IDLE_S = 60.0


@dataclass(slots=True)
class StubRequest:
    submit: Submit
    position: int


def _phases_of(submit: Submit) -> RequestPhases:
    """All that an engine tells of a traced request that nothing disturbs, at once."""
    changes = [PhaseChange("queue", 0.0), PhaseChange("prefill", 0.0), PhaseChange("decode", 0.0, num_tokens=1)]
    return RequestPhases(submit.request_id, submit.epoch, changes)


class StubEngine:
    """Without its socket and its clock."""

    def __init__(self, incarnation: str, token_ids: list[int]) -> None:
        self._incarnation = incarnation
        self._token_ids = token_ids
        self._running: dict[str, StubRequest] = {}
        self._seq = self._step = 0

    @property
    def is_idle(self) -> bool:
        return not self._running

    def handle(self, message: ToEngine) -> list[FromEngine]:
        self._seq = message.seq
        match message:
            case Submit():
                self._running[message.request_id] = StubRequest(message, len(message.generated_token_ids))
                accepted = RequestAccepted(message.request_id, message.epoch)
                return [accepted, *([_phases_of(message)] if message.trace_id else [])]
            case Abort():
                self._running.pop(message.request_id, None)
                return []
            case AbortByName():
                return [AbortReply(message.query_id, [], message.names)]
            case QueryKvEvents():
                return []  # who asks waits a second, and goes on without

    def step(self) -> TokenDeltas:
        """One token for every running request."""
        self._step += 1
        return TokenDeltas(self._step, [self._next(one) for one in list(self._running.values())])

    def holding(self) -> HeldRequestsReport:
        held = [HeldRequest(request_id, one.submit.epoch, one.position) for request_id, one in self._running.items()]
        return HeldRequestsReport(self._incarnation, self._seq, self._step, held)

    def _next(self, one: StubRequest) -> TokenDelta:
        submit, position = one.submit, one.position
        one.position += 1
        reason = "length" if one.position == submit.sampling_params.max_tokens else None
        if reason is not None:
            del self._running[submit.request_id]
        token_id = self._token_ids[position % len(self._token_ids)]
        return TokenDelta(
            submit.request_id, submit.epoch, position, [token_id], len(submit.prompt_token_ids), 0, finish_reason=reason
        )


def run(engine: StubEngine, address: str, interval_s: float) -> None:
    """Until it is killed."""
    wires = SocketPoller()
    port = wires.engine_server(address)
    api: str | None = None
    next_step_s = next_holding_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        due_s = next_holding_s if engine.is_idle else min(next_step_s, next_holding_s)
        wires.wait(math.ceil(1000 * min(IDLE_S, max(0.0, due_s - now_s))))
        while (received := port.receive()) is not None:
            api, message = received
            for answer in engine.handle(message):
                port.send(api, answer)
        now_s = time.monotonic()
        if api is not None and not engine.is_idle and now_s >= next_step_s:
            port.send(api, engine.step())
            # What was missed is not made up for: a step that is late moves those behind it.
            next_step_s = max(next_step_s + interval_s, now_s)
        if api is not None and now_s >= next_holding_s:
            port.send(api, engine.holding())
            next_holding_s = now_s + HOLDING_EVERY_S


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An engine that computes nothing.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument(
        "--interval-ms", type=float, required=True, help="between steps; 0: as fast as they can be sent"
    )
    parser.add_argument("--token-ids", type=lambda text: [int(one) for one in text.split(",")], required=True)
    args = parser.parse_args()
    run(StubEngine(args.incarnation, args.token_ids), args.address, args.interval_ms / 1000)

"""A stream of events, and the bytes that a server sends of it to a client that resumes behind any event with an id."""

from dataclasses import dataclass, field

DONE = b"data: [DONE]\n\n"


@dataclass
class ModelServer:
    """The events of one stream: some without an id, each of which belongs to the next one with an id."""

    events: list[bytes]
    requests: list[str] = field(default_factory=list)
    """The `Last-Event-ID` of each."""

    def answer(self, headers: dict[str, str]) -> bytes:
        last_event_id = headers.get("Last-Event-ID", "")
        self.requests.append(last_event_id)
        if not last_event_id:
            return b"".join(self.events) + DONE
        [place] = [i for i, event in enumerate(self.events) if event.startswith(b"id: %b\n" % last_event_id.encode())]
        return b"".join(self.events[place + 1 :]) + DONE


def chat_events(texts: list[str]) -> list[bytes]:
    """An opening without an id, then one event for each text."""
    opening = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
    return [opening, *(token_event(position + 1, text) for position, text in enumerate(texts))]


def token_event(position: int, text: str) -> bytes:
    return (
        f'id: 1;a;0;7;1;{position};0:5\ndata: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()
    )

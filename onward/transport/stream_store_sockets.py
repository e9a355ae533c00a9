"""The sockets between api processes and the stream store. The number of queued messages is bounded here, their size by
the senders (`api.lifecycle.stream_store_client`)."""

from typing import Any

import zmq

from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.transport.api_sockets import ApiClientSocket, ApiServerSocket

QUEUE_LENGTH = 4096


class StreamStoreClientSocket(ApiClientSocket[ToStreamStore, FromStreamStore]):
    def __init__(self, address: str, api_incarnation: str) -> None:
        super().__init__(address, api_incarnation, FromStreamStore, QUEUE_LENGTH)


class StreamStoreServerSocket(ApiServerSocket[ToStreamStore, FromStreamStore]):
    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, address, ToStreamStore, QUEUE_LENGTH)

"""The dialogue of the api processes with their shelf. Bounded by number here; by size by those who send
(`api.shelf_link`).
"""

from typing import Any

import zmq

from onward.proto.shelf import FromShelf, ToShelf
from onward.transport.api_dialogue import ApiEnd, OwnerEnd

QUEUE_LENGTH = 4096


class ShelfSocket(ApiEnd[ToShelf, FromShelf]):
    def __init__(self, address: str, api_incarnation: str) -> None:
        super().__init__(address, api_incarnation, FromShelf, QUEUE_LENGTH)


class ShelfPort(OwnerEnd[ToShelf, FromShelf]):
    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, address, ToShelf, QUEUE_LENGTH)

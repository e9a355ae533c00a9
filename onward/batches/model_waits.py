"""Decides how long the requests of a batch wait for a model that is not served. Pure; no clock."""

from onward.batches.batch_files import BatchRequest

MAX_MODEL_BYTES = 256


def model_of(request: BatchRequest) -> bytes:
    """Returns the field `model` as it is in the request, or its beginning if it is too long for a name."""
    return bytes(request.body.get("model", b""))[:MAX_MODEL_BYTES]


class ModelWaits:
    def __init__(self, grace_s: float) -> None:
        """`grace_s`: how long a batch waits for a missing model that has not answered any of its requests; 0: it waits
        for no model."""
        self._grace_s = grace_s
        self._answered: set[bytes] = set()
        self._missing_since_s: dict[bytes, float] = {}

    def add_answer(self, model: bytes) -> None:
        """Notes that the model exists."""
        self._answered.add(model)

    def may_come(self, model: bytes, now_s: float) -> bool:
        """Returns whether a model that is not served now may be served later."""
        if not self._grace_s:
            return False
        since_s = self._missing_since_s.setdefault(model, now_s)
        return model in self._answered or now_s < since_s + self._grace_s

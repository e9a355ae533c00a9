"""Ids of requests. The engine knows each choice of a client's request by an id of its own: the external id and a number."""


def external_id(request_id: str) -> str:
    """Returns the id that the client knows: the engine's id without the number of the choice."""
    return request_id.rpartition("-")[0] or request_id

"""The child processes of an instance, as `SupervisorCore` sees them: the role and the state of each."""

from dataclasses import dataclass
from enum import Enum

from onward.supervisor.worker_deaths import KillReason


class ProcessRole(Enum):
    STREAM_STORE = "stream_store"
    ENGINE = "engine"
    WORKER = "worker"
    STANDBY = "standby"
    """A worker that has loaded everything and waits until it is needed."""
    API = "api"


class ChildState(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class Child:
    role: ProcessRole
    index: int
    incarnation: str
    started_at_s: float
    state: ChildState = ChildState.STARTING
    last_reply_at_s: float = 0.0
    """When it became ready or answered the last `QueryMetrics`."""
    isolated_request_id: str | None = None
    """For an engine: the isolated request that its death is charged to."""
    kv_memory: str = ""
    """For a worker: the KV memory that it has attached."""
    was_standby: bool = False
    kill_reason: KillReason | None = None
    """Why the supervisor has killed it, if it has."""

"""Messages between the supervisor and its children, over the socket pair that each child inherits.

If the supervisor dies, the socket closes and the child exits. If a child dies, the supervisor reaps it, restarts it
under a new incarnation, and only then informs the others. This announcement, never a timeout, makes the layer above
resubmit.
"""

import msgspec

from onward.config import ApiConfig, EngineConfig, LogFormat, WorkerConfig
from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.demo import RequestKill
from onward.proto.field_types import Count, Duration, FileDescriptor, Serial, UnitInterval
from onward.proto.live import LiveEngine, LiveSnapshot, QueryLive
from onward.proto.model import PreparedModel
from onward.proto.stats import EngineStats, MetricFamily
from onward.proto.step import WorkerHello
from onward.proto.worker_wire_address import WorkerWireAddress


class StartEngine(msgspec.Struct, frozen=True, tag="start_engine"):
    incarnation: str
    config: EngineConfig
    address: str
    """Where it shall listen for api processes, with the key that only it holds."""
    handoff_fd: FileDescriptor = -1
    """A listening socket for decode instances, where there is one."""
    awaits_turn: bool = False
    """Connections of decode instances are an old server's until `StartListening`."""
    cluster_key: str = ""
    """Secret of the cluster, as hex. Empty if there is none; all addresses are then local."""


class KeptWeights(msgspec.Struct, frozen=True):
    """Weights on a CUDA device that an earlier worker has loaded."""

    fd: FileDescriptor
    """Keeps the memory allocated, and is what a process maps it from."""
    num_bytes: Serial
    checksum: str
    """Checksum of the weights as they were loaded."""
    layout: str = ""
    """Hash of where each tensor lies. Another version that adopts the weights may expect another layout."""


class StartWorker(msgspec.Struct, frozen=True, tag="start_worker"):
    incarnation: str
    engine_incarnation: str
    config: WorkerConfig
    model: PreparedModel
    wire: WorkerWireAddress | None
    """None: a standby worker, which loads everything and waits for `ActivateWorker`."""
    kv_address: str = ""
    """Where the engine speaks of KV transfers; empty: there are none."""
    cluster_key: str = ""
    kv_memory: str = ""
    """The KV memory that it shall attach; empty: it allocates memory of its own, which ends with it."""
    kv_memory_fd: FileDescriptor = -1
    """File descriptor of that memory. On a CPU the first worker that gets it sets its size. On a CUDA device the first
    worker gets none, and sends `DeviceKvAllocated`."""
    kv_memory_bytes: Serial = 0
    """Size of that memory on a CUDA device."""
    weights: KeptWeights | None = None
    """On a CUDA device, once a worker has sent `DeviceWeightsLoaded`."""
    rank_fds: list[FileDescriptor] = []
    """Sockets to the other ranks with `--tensor-parallel`, in the order of the ranks."""
    writer_token_fd: FileDescriptor = -1
    """For each peer that maps the KV memory: it keeps a copy open for as long as it can write."""


class ActivateWorker(msgspec.Struct, frozen=True, tag="activate_worker"):
    """To a standby worker: from now on it serves this engine. The file descriptors of an `shm` wire travel with it."""

    engine_incarnation: str
    wire: WorkerWireAddress
    kv_address: str = ""
    """As in `StartWorker`."""


class StartApi(msgspec.Struct, frozen=True, tag="start_api"):
    incarnation: str
    index: Count
    config: ApiConfig
    model: PreparedModel
    listen_fd: FileDescriptor
    keys: list[ApiKeyEntry] = []
    """If empty, access needs no key."""
    awaits_turn: bool = False
    """Connections are an old server's until `StartListening`."""


class StartListening(msgspec.Struct, frozen=True, tag="start_listening"):
    """To an api process or engine with `awaits_turn`: accept connections from now on."""


class StartStreamStore(msgspec.Struct, frozen=True, tag="start_shelf"):
    incarnation: str
    address: str
    """Where it shall listen for api processes, with the key that only it holds."""
    log_level: str = "info"
    log_format: LogFormat = "text"


class WorkerStarting(msgspec.Struct, frozen=True, tag="worker_starting"):
    """To the engine: this worker will come on this wire. The file descriptors of an `shm` wire travel with it, and that of
    the table of block names of `kv_memory`."""

    incarnation: str
    wire: WorkerWireAddress
    kv_address: str = ""
    """Where the engine shall listen for what the worker has to say of KV transfers."""
    kv_memory: str = ""
    """The KV memory that the worker attaches; empty: memory of its own."""


class WorkerGone(msgspec.Struct, frozen=True, tag="worker_gone"):
    """To the engine: the worker is dead and reaped."""

    incarnation: str
    cause: str
    keeps_memory: bool = False
    """Whether the next worker attaches the same KV memory."""


class EngineUp(msgspec.Struct, frozen=True, tag="engine_up"):
    """To the api processes: this engine serves now; whatever another one held is lost."""

    incarnation: str
    address: str
    worker: WorkerHello


class EngineGone(msgspec.Struct, frozen=True, tag="engine_gone"):
    incarnation: str
    cause: str
    isolated_request_id: str | None = None
    """The request that it ran, or was taking in, by itself when it died. None: any of its requests may be the cause."""


class StreamStoreUp(msgspec.Struct, frozen=True, tag="shelf_up"):
    """To the api processes: this one keeps records from now on; whatever another one had is lost."""

    incarnation: str
    address: str


class StreamStoreGone(msgspec.Struct, frozen=True, tag="shelf_gone"):
    incarnation: str


class ApiGone(msgspec.Struct, frozen=True, tag="api_gone"):
    """To the engine and the stream store: that api process is dead, and its clients with it."""

    incarnation: str


class QueryMetrics(msgspec.Struct, frozen=True, tag="ask_snapshot"):
    query_id: Serial


class ProcessView(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    pid: Count
    incarnation: str
    state: str
    """`starting`, `ready` or `stopping`."""
    rank: Count | None = None
    """With `--tensor-parallel`: the rank of a process of the worker. All ranks have one incarnation."""


class InstanceView(msgspec.Struct, frozen=True, tag="instance_view"):
    """Answers `QueryInstance`: the whole instance, whichever process was asked."""

    query_id: Serial
    incarnation: str
    processes: list[ProcessView]
    restarts: dict[str, Count]
    families: list[MetricFamily]
    engine: EngineStats | None
    oom_kills: dict[str, Count] = {}
    """Processes that the kernel killed for lack of memory, by role."""


class LiveView(msgspec.Struct, frozen=True, tag="live_view"):
    """Answers `QueryLive` of an api process."""

    query_id: Serial
    incarnation: str
    processes: list[ProcessView]
    restarts: dict[str, Count]
    engine: LiveEngine | None
    """None: there is no engine that answers."""


class StopChild(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what you can within `grace_s`, then leave."""

    grace_s: Duration
    is_replaced: bool = False
    """A new server takes over at the same address: routers shall wait for it."""


class UpdateApiKeys(msgspec.Struct, frozen=True, tag="new_keys"):
    """To the api processes: these keys count from now on, and no others."""

    keys: list[ApiKeyEntry]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To the api processes: take no new requests. Streams that run end here, or a router moves them."""


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """To the api processes: take requests again."""


ToChild = (
    StartEngine
    | StartWorker
    | ActivateWorker
    | StartApi
    | StartStreamStore
    | WorkerStarting
    | WorkerGone
    | EngineUp
    | EngineGone
    | StreamStoreUp
    | StreamStoreGone
    | ApiGone
    | QueryMetrics
    | QueryLive
    | InstanceView
    | LiveView
    | UpdateApiKeys
    | StartListening
    | Drain
    | Undrain
    | StopChild
)


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """The child can do its work. From the engine it comes once its worker has said hello, and again after each restart;
    from a standby worker when it has loaded everything."""

    worker: WorkerHello | None = None


class DeviceWeightsLoaded(msgspec.Struct, frozen=True, tag="device_weights_loaded"):
    """From a worker on a CUDA device: its weights are complete. Their file descriptor travels with it."""

    num_bytes: Serial
    checksum: str
    layout: str


class DeviceKvAllocated(msgspec.Struct, frozen=True, tag="device_kv_allocated"):
    """From a worker on a CUDA device that has allocated the requested KV memory. Its file descriptor is attached."""

    kv_memory: str
    num_bytes: Serial
    has_standby_room: bool
    """Whether the pool leaves enough of the device's memory for a standby worker."""


class StartupProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A step of the child's start, for people to read."""

    message: str
    fraction: UnitInterval | None = None
    """How much of it is done; None: unknown."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The child cannot start and trying again will not help. One line: what is wrong and what to do."""

    message: str


class ReplaceWorker(msgspec.Struct, frozen=True, tag="renew_worker"):
    """From the engine: end this worker and start another, because too many of its KV blocks are quarantined."""

    incarnation: str
    cause: str


class IsolatedRequestRunning(msgspec.Struct, frozen=True, tag="runs_alone"):
    """From the engine, before it does anything for a request that is suspected of killing engines: a death from here on is
    that request's. None: it is not any single one's."""

    request_id: str | None


class MetricsSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    query_id: Serial
    families: list[MetricFamily]
    engine: EngineStats | None = None


class QueryInstance(msgspec.Struct, frozen=True, tag="ask_instance"):
    query_id: Serial


class RequestDrain(msgspec.Struct, frozen=True, tag="ask_drain"):
    """From an api process that was asked to drain the instance."""


class RequestUndrain(msgspec.Struct, frozen=True, tag="ask_undrain"):
    """From an api process that was asked to end the drain, so that the instance takes requests again."""


FromChild = (
    ChildReady
    | DeviceWeightsLoaded
    | DeviceKvAllocated
    | StartupProgress
    | StartFailed
    | ReplaceWorker
    | IsolatedRequestRunning
    | MetricsSnapshot
    | LiveSnapshot
    | QueryInstance
    | QueryLive
    | RequestDrain
    | RequestUndrain
    | RequestKill
)

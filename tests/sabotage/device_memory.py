"""Deliberate bugs of weights and KV on a CUDA device that outlive workers."""

from collections.abc import Callable
from typing import Any

from onward.proto.control import DeviceKvAllocated, KeptWeights, ReplaceWorker
from onward.supervisor.core import SupervisorCore
from onward.supervisor.kv_memory_owner import KvMemoryOwner
from onward.supervisor.supervisor import Supervisor
from onward.worker import kv_memory_budget
from onward.worker.cuda import kept_device_memory, torch_device
from onward.worker.cuda.torch_device import TorchDevice
from onward.worker.kept_memory import KeptMemory
from tests.sabotage.patches import Patches, Sabotage

OWNER = "tests/supervisor/test_kv_memory_owner.py::"
SUPERVISOR = "tests/supervisor/test_device_memory.py::"
WORKER = "tests/worker/cuda/test_kept_device_memory.py::"
STANDBY = "tests/supervisor/test_standby.py::"
BUDGET = "tests/worker/test_memory.py::"


def _trust_weights(patch: Patches) -> None:
    patch.around(kept_device_memory, "checksum", lambda original, memory: "the same for all")


def _warm_up_in_block_0(patch: Patches) -> None:
    patch.put(TorchDevice, "scratch_block", property(lambda self: 0))


def _report_memory_that_is_not_kept(patch: Patches) -> None:
    patch.put(KeptMemory, "reported_name", property(lambda self: self.name))


def _go_on_without_the_descriptor(patch: Patches) -> None:
    def on_message(original: Callable, self: SupervisorCore, child: Any, message: Any, now_s: float) -> list:
        return [] if isinstance(message, ReplaceWorker) else original(self, child, message, now_s)

    patch.around(SupervisorCore, "on_message", on_message)


def _start_a_standby_without_a_pool(patch: Patches) -> None:
    patch.put(KvMemoryOwner, "has_pool", lambda self, name: True)


def _take_any_pool(patch: Patches) -> None:
    def take_kv(original: Callable, self: KvMemoryOwner, allocated: DeviceKvAllocated, fd: int) -> None:
        assert self._fds is not None
        self._fds, self.num_pool_bytes = self._fds._replace(pool=fd), allocated.num_bytes

    patch.around(KvMemoryOwner, "take_kv", take_kv)


def _end_weights_with_kv(patch: Patches) -> None:
    def close_kv(original: Callable, self: KvMemoryOwner) -> None:
        original(self)
        self.drop_weights()

    patch.around(KvMemoryOwner, "_close_kv", close_kv)


def _keep_old_weights_open(patch: Patches) -> None:
    def drop_weights(original: Callable, self: KvMemoryOwner) -> None:
        self.weights: KeptWeights | None = None

    patch.around(KvMemoryOwner, "drop_weights", drop_weights)


def _keep_weights_that_no_worker_starts_with(patch: Patches) -> None:
    patch.put(Supervisor, "_judge_weights", lambda self, worker, return_code: None)


def _forget_what_a_removed_worker_sent(patch: Patches) -> None:
    patch.put(Supervisor, "_take_last_device_memory", lambda self, child: None)


def _forgive_a_standby_that_failed(patch: Patches) -> None:
    """Only a signal of its own counts."""

    def on_exit(original: Callable, self: SupervisorCore, standby: Any, return_code: int, now_s: float) -> list:
        return original(self, standby, min(0, return_code), now_s)

    patch.around(SupervisorCore, "_on_standby_exit", on_exit)


def _allocate_beside_wide_weights(patch: Patches) -> None:
    def load(original: Callable, model: Any, weights: Any, dtype: Any, device: str, memory: Any) -> Any:
        if memory is not None and model.quantization == "fp8":
            memory.create_weights(8)
        return original(model, weights, dtype, device, memory)

    patch.around(torch_device, "_load_weights", load)


def _leave_a_standby_no_room(patch: Patches) -> None:
    patch.put(kv_memory_budget, "CONTEXT_RESERVE_BYTES", 0)


TABLE = [
    Sabotage(
        "damaged-weights-used",
        "weights on a device that a crashed worker has damaged are used by the next one",
        _trust_weights,
        [WORKER + f"test_a_worker_does_not_start_with_damaged_weights[{place}]" for place in (0, 12345, -1)],
    ),
    Sabotage(
        "device-warm-up-in-block-0",
        "a worker that starts on a device writes a block that the engine may have handed out",
        _warm_up_in_block_0,
        [WORKER + "test_a_second_worker_changes_no_byte_of_a_block_that_may_be_handed_out"],
    ),
    Sabotage(
        "unkept-memory-reported",
        "a worker reports KV memory as kept that the supervisor did not get",
        _report_memory_that_is_not_kept,
        [WORKER + "test_memory_that_the_supervisor_did_not_get_is_not_reported_as_kept"],
    ),
    Sabotage(
        "lost-descriptor-ignored",
        "a worker goes on although the supervisor did not get its KV memory",
        _go_on_without_the_descriptor,
        [SUPERVISOR + "test_a_pool_whose_descriptor_got_lost_is_given_up_with_its_worker"],
    ),
    Sabotage(
        "standby-without-pool",
        "a standby starts before there is a pool on the device, and allocates another one",
        _start_a_standby_without_a_pool,
        [SUPERVISOR + "test_a_standby_is_not_started_before_there_is_a_pool_to_attach"],
    ),
    Sabotage(
        "pool-of-ended-memory-taken",
        "a pool that belongs to memory which was given up becomes that of its successor",
        _take_any_pool,
        [
            OWNER + "test_a_pool_of_memory_that_was_given_up_is_not_taken",
            OWNER + "test_a_second_pool_of_the_same_name_is_not_taken",
        ],
    ),
    Sabotage(
        "weights-end-with-kv",
        "weights on a device are given up with the KV memory",
        _end_weights_with_kv,
        [OWNER + "test_weights_stay_when_kv_memory_is_given_up_and_newer_ones_replace_them"],
    ),
    Sabotage(
        "old-weights-kept-open",
        "weights on a device that were replaced are never freed",
        _keep_old_weights_open,
        [OWNER + "test_weights_stay_when_kv_memory_is_given_up_and_newer_ones_replace_them"],
    ),
    Sabotage(
        "unusable-weights-kept",
        "weights that no worker can start with are given to every worker",
        _keep_weights_that_no_worker_starts_with,
        [SUPERVISOR + "test_weights_that_a_worker_cannot_start_with_are_loaded_again[1-False]"],
    ),
    Sabotage(
        "last-memory-forgotten",
        "a pool that a worker sent just before its engine died is replaced by an empty one under the same name",
        _forget_what_a_removed_worker_sent,
        [SUPERVISOR + "test_a_pool_that_was_sent_just_before_the_engine_died_is_kept"],
    ),
    Sabotage(
        "failed-standby-forgiven",
        "memory beside a standby that ended with a CUDA error is used on",
        _forgive_a_standby_that_failed,
        [STANDBY + "test_a_standby_that_dies_of_a_fault_costs_the_memory_that_it_may_have_damaged[exception]"],
    ),
    Sabotage(
        "shared-memory-beside-wide-weights",
        "quantized weights take shared memory while the wide ones are still there",
        _allocate_beside_wide_weights,
        [WORKER + "test_quantized_weights_need_no_shared_memory_while_the_wide_ones_are_there"],
    ),
    Sabotage(
        "no-room-for-standby",
        "the pool on a device takes the memory that a standby worker needs",
        _leave_a_standby_no_room,
        [BUDGET + "test_a_pool_leaves_room_for_a_standby_worker"],
    ),
]

"""Runners behind one interface, and what is said where there is no device."""

import msgspec
import pytest

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.proto.step import RunSlot, SlotTokens, StepPlan
from onward.worker.cuda.open_device import check_capability
from onward.worker.runner_factory import open_runner
from tests.worker import small_int8
from tests.worker.cuda.small_model import CONFIG, DeviceDriver
from tests.worker.driver import prepared


def test_steps_of_a_device_that_computes_in_the_call_are_computed_in_order_when_they_are_asked_for() -> None:
    driver = small_int8.driver()
    runner = driver.runner
    assert (runner.is_busy, runner.has_result, runner.finish()) == (False, False, None)
    request = driver.assign(0, [5, 9, 11], room=2)
    runner.begin(StepPlan(1, assign=[request], run=[RunSlot(0, request.slot_epoch, 3)]))
    runner.begin(StepPlan(2, run=[RunSlot(0, request.slot_epoch, 1)]))
    assert runner.is_busy and runner.has_result
    first, second = runner.finish(), runner.finish()
    assert first is not None and second is not None
    assert [(r.step, type(r.events[0])) for r in (first, second)] == [(1, SlotTokens), (2, SlotTokens)]
    assert not runner.is_busy


def test_a_machine_without_a_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("onward.worker.cuda.kernel_precompile.has_gpu", lambda: False)
    with pytest.raises(StartupError, match="finds no CUDA device here"):
        open_runner(prepared(CONFIG), WorkerConfig(device="cuda"), lambda message, fraction: None)


@pytest.mark.parametrize(
    ("capability", "deterministic", "refusal"),
    [
        ((9, 0), True, None),
        ((9, 0), False, None),
        ((10, 0), False, None),
        ((10, 0), True, "start with --no-deterministic"),
        ((8, 9), False, "compute capability 9.0 .* this device has 8.9"),
    ],
)
def test_a_guarantee_is_given_only_on_devices_where_it_was_shown(
    capability: tuple[int, int], deterministic: bool, refusal: str | None
) -> None:
    if refusal is None:
        check_capability(capability, deterministic=deterministic)
    else:
        with pytest.raises(StartupError, match=refusal):
            check_capability(capability, deterministic=deterministic)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(129, 1), (6, 4)], ids=["more than a tile holds", "unevenly"])
def test_heads_that_cannot_share_their_kv_heads_are_refused(num_heads: int, num_kv_heads: int) -> None:
    message = f"{num_heads} heads for {num_kv_heads} KV heads; on CUDA they must share them evenly, at most 128 each"
    with pytest.raises(StartupError, match=message):
        DeviceDriver(msgspec.structs.replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("size", [24, 8])
def test_blocks_that_kernels_cannot_compute_with_are_refused(size: int) -> None:
    with pytest.raises(StartupError, match=f"--block-size {size} is not a power of two"):
        DeviceDriver(block_size=size)

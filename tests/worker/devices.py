"""Every device that the suite of the runner runs over, with one small random model. Modules that only one device needs are
imported with it: a machine with a CUDA device may not have the CPU's."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from onward.proto.model import ModelConfig, PreparedModel
from onward.worker.logits_processors.mask_executor import MaskExecutor
from tests.worker.cuda.small_model import CONFIG, SETTINGS, SPOKEN, DeviceDriver, random_weights, spoken_model
from tests.worker.driver import Driver, prepared

NewDriver = Callable[..., Driver]
"""Settings in, a driver out. Behind `nan_token` the model's output is no number."""
DEVICES = ["int8", "torch", pytest.param("triton", marks=pytest.mark.gpu)]


def new_driver(device: str) -> NewDriver:
    def create(
        config: ModelConfig = CONFIG, *, nan_token: int | None = None, model: PreparedModel | None = None,
        masks: MaskExecutor | None = None, drafter: Any = None, **settings: Any,
    ) -> Driver:  # fmt: skip
        tensors = dict(random_weights(config))
        if device == "int8":
            from onward.kernels.quantize import quantize_model

            model = msgspec.structs.replace(model or prepared(config), quantization="int8")
            arrays = dict(quantize_model(config, tensors))
            if nan_token is not None:
                arrays["embed"][nan_token // 16, :, 512:].view(np.float32)[:, nan_token % 16] = np.nan  # its scales
            return Driver(model, arrays, masks, drafter, **(SETTINGS | settings))
        assert drafter is None, "drafts are verified on the CPU"
        if nan_token is not None:
            tensors["model.embed_tokens.weight"][nan_token] = np.nan
        if device == "torch":
            return DeviceDriver(config, weights=tensors, model=model, masks=masks, **settings)
        from onward.kernels.triton.triton_ops import TritonOps

        ops = TritonOps(max_model_len=256)
        return DeviceDriver(config, ops=ops, device="cuda", weights=tensors, model=model, masks=masks, **settings)

    return create


def spoken(new: NewDriver, masks: MaskExecutor | None = None, **settings: Any) -> Driver:
    """Speaks the simulator's vocabulary, so that its outputs are text."""
    with spoken_model() as model:
        driver = new(SPOKEN, model=model, masks=masks, **settings)
        driver.runner._grammar_compiler.get()  # reads the file
        return driver

"""EAGLE's draft layer for Llama: a product over [embedding; hidden], then one decoder layer of the float family.

Its attention reads its input without a norm, unless the checkpoint has one, and its output goes to the served model's
head without a norm. Layers for multi-token prediction (MTP) have the same place and the same inputs; they differ in
norms around the product.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from onward.models.layers.float_layers import Attention, FloatDecoderLayer, Linear
from onward.models.layers.forward_batch import ForwardBatch
from onward.proto.model import ModelConfig


class EagleLayer:
    def __init__(self, weights: Mapping[str, Any], config: ModelConfig, attention: Attention) -> None:
        """`weights` are named as in EAGLE's checkpoints."""
        biases = [weights["fc.bias"]] if "fc.bias" in weights else []
        self._fc = Linear([weights["fc.weight"]], biases, torch.float32)
        layer_weights = {f"model.{name}": tensor for name, tensor in weights.items()}
        has_norm = "layers.0.input_layernorm.weight" in weights
        self._block = FloatDecoderLayer(0, layer_weights, config, attention, torch.float32, has_input_norm=has_norm)

    @torch.inference_mode()
    def __call__(self, embedded: np.ndarray, hidden: np.ndarray, rows: ForwardBatch) -> np.ndarray:
        """Takes the embedding of each row's token and the hidden state before it. Returns the layer's output, [rows,
        hidden_size]."""
        joined = torch.from_numpy(np.concatenate([embedded, hidden], axis=1))
        return self._block(self._fc(joined), rows).numpy()
